"""One learning-rate schedule over all inner steps, however they are cut into rounds."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import build_model
from isoloco_flwr.pretraining.schedule import SCHEDULES, learning_rate_factor

runs = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 300), st.floats(0, 1, exclude_max=True))


def factors(schedule, total, warmup_fraction):
    return [
        learning_rate_factor(step, total, schedule=schedule, warmup_fraction=warmup_fraction)
        for step in range(total)
    ]


@given(runs)
def test_every_step_has_a_rate_and_none_exceeds_the_peak(run):
    assert all(0 < factor <= 1 for factor in factors(*run))


@given(runs)
def test_a_rate_rises_in_the_warm_up_then_never_again(run):
    schedule, total, warmup_fraction = run
    values = factors(*run)
    top = values.index(max(values))
    assert top < max(1, round(total * warmup_fraction))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    if schedule != "wsd" or warmup_fraction < 0.75:
        assert values[top] == 1.0


@given(runs)
def test_the_warm_up_is_a_line_from_zero(run):
    schedule, total, warmup_fraction = run
    warmup = max(1, round(total * warmup_fraction))
    until = min(warmup, total - round(0.2 * total) - 1) if schedule == "wsd" else warmup
    values = factors(*run)[:until]
    assert values == pytest.approx([(step + 1) / warmup for step in range(until)])


@given(runs)
def test_the_end_is_one_step_before_zero(run):
    schedule, total, warmup_fraction = run
    values = factors(*run)
    if total < 20 or warmup_fraction > 0.75:
        return
    if schedule == "constant":
        assert set(values[round(total * warmup_fraction) :]) == {1.0}
    elif schedule == "wsd":
        decay = round(0.2 * total)
        assert values[-decay:] == pytest.approx(
            [(decay - step) / (decay + 1) for step in range(decay)]
        )
        assert values[-decay - 1] == 1.0
    else:
        assert values[-1] < 1 - math.cos(math.pi / (0.2 * total))


def test_warm_up_then_cosine():
    values = factors("cosine", 100, 0.1)
    assert values == [learning_rate_factor(step, 100) for step in range(100)]  # the default
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert all(one > other for one, other in pairwise(values[9:]))
    assert values[10 + 45 - 1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 45 / 91)))
    assert 0 < values[-1] < 0.001


def test_warm_up_stable_decay():
    values = factors("wsd", 100, 0.05)
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(values[4:80]) == {1.0}
    assert values[80] == 20 / 21
    assert values[-1] == 1 / 21


@pytest.mark.parametrize("step", [-1, 5])
def test_a_step_outside_the_run_is_refused(step):
    with pytest.raises(ValueError, match=f"step {step}: allowed is 0 <= step < 5"):
        learning_rate_factor(step, 5)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="'linear': allowed is one of cosine, constant, wsd"):
        learning_rate_factor(0, 5, schedule="linear")


def rates_used(cuts, **keywords):
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
            Recorder([{"params": list(model.parameters()), "lr": 123.0, "peak_lr": 0.25}]),
            lambda step: torch.full((1, 5), step % 8),
            first_step=first,
            steps=steps,
            total_steps=sum(cuts),
            **keywords,
        )
        first += steps
    return rates


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_three_rounds_have_the_schedule_of_one_unbroken_run(schedule):
    unbroken = rates_used([12], schedule=schedule, warmup_fraction=0.25)
    assert rates_used([4, 4, 4], schedule=schedule, warmup_fraction=0.25) == unbroken
    assert unbroken == [0.25 * factor for factor in factors(schedule, 12, 0.25)]
