"""One learning-rate schedule over all inner steps, however they are cut into rounds."""

import math
from itertools import pairwise

import pytest
import torch

from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import build_model
from isoloco_flwr.pretraining.schedule import learning_rate_factor


def test_warm_up_then_cosine():
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[9] == 1.0
    assert all(one > other for one, other in pairwise(factors[9:]))
    assert factors[10 + 45 - 1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 45 / 91)))
    assert 0 < factors[-1] < 0.001


@pytest.mark.parametrize("total", [1, 2, 3, 9])
def test_short_runs_have_positive_rates(total):
    assert all(0 < learning_rate_factor(step, total) <= 1 for step in range(total))


@pytest.mark.parametrize("step", [-1, 5])
def test_a_step_outside_the_run_is_refused(step):
    with pytest.raises(ValueError, match=f"step {step}: allowed is 0 <= step < 5"):
        learning_rate_factor(step, 5)


def rates_used(cuts):
    """Record the learning rate of every step of a run that is cut into rounds."""
    model = build_model("demo", vocabulary_size=8, seed=0)
    rates = []

    class Recorder(torch.optim.SGD):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            return super().step()

    first = 0
    for steps in cuts:
        run_inner_steps(
            model,
            Recorder(model.parameters(), lr=123.0),
            lambda step: torch.full((1, 5), step % 8),
            first_step=first,
            steps=steps,
            total_steps=sum(cuts),
            lr=0.25,
        )
        first += steps
    return rates


def test_three_rounds_have_the_schedule_of_one_unbroken_run():
    unbroken = rates_used([12])
    assert rates_used([4, 4, 4]) == unbroken
    assert unbroken == [0.25 * learning_rate_factor(step, 12) for step in range(12)]
