"""Accumulation, skipped steps, precision and learning rates of the inner loop."""

import math
import time
from contextlib import nullcontext

import pytest
import torch

from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import build_model
from isoloco_flwr.pretraining.optimizers import build_inner_optimizer


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(257, (4, 17), generator=generator)


def demo():
    return build_model("demo", vocabulary_size=257, seed=1)


def train(model, optimizer, first_step=0, steps=3, **keywords):
    return run_inner_steps(
        model, optimizer, batch, first_step=first_step, steps=steps, total_steps=20, **keywords
    )


class Recorder(torch.optim.SGD):
    """Keeps the gradients and learning rates that it is given, and moves nothing."""

    def __init__(self, groups):
        super().__init__(groups, lr=1.0)
        self.gradients = []
        self.rates = []

    def step(self):
        self.rates.append([group["lr"] for group in self.param_groups])
        self.gradients.append(
            torch.cat(
                [value.grad.flatten() for group in self.param_groups for value in group["params"]]
            )
        )


def gradients(clip_norm=math.inf, **keywords):
    model = demo()
    recorder = Recorder([{"params": list(model.parameters()), "peak_lr": 1.0}])
    report = train(model, recorder, clip_norm=clip_norm, **keywords)
    return torch.stack(recorder.gradients), report


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 9])
def test_accumulated_gradients_are_those_of_the_whole_batch(micro_batch_size):
    whole, expected = gradients()
    parts, report = gradients(micro_batch_size=micro_batch_size)
    assert (parts - whole).abs().max() < 1e-6
    assert whole.abs().max() > 0.1  # so that the bound says something
    assert report.mean_loss == pytest.approx(expected.mean_loss, rel=1e-6)
    assert report.mean_gradient_norm == pytest.approx(expected.mean_gradient_norm, rel=1e-5)
    assert report.tokens == expected.tokens == 3 * 4 * 16


def test_a_micro_batch_of_the_whole_batch_changes_no_bit():
    assert torch.equal(gradients(micro_batch_size=4)[0], gradients()[0])


def test_gradients_are_clipped_together_after_accumulation():
    free, report = gradients(micro_batch_size=1)
    assert report.mean_gradient_norm == pytest.approx(
        free.double().norm(dim=1).mean().item(), rel=1e-5
    )
    clipped, report_clipped = gradients(micro_batch_size=1, clip_norm=0.5)
    assert clipped.double().norm(dim=1).tolist() == pytest.approx([0.5] * 3, rel=1e-5)
    assert torch.nn.functional.cosine_similarity(clipped, free).min() > 1 - 1e-5
    assert report_clipped.mean_gradient_norm == report.mean_gradient_norm  # before clipping


def test_every_group_has_its_own_peak():
    model = demo()
    first, *others = model.parameters()
    recorder = Recorder([{"params": [first], "peak_lr": 0.5}, {"params": others, "peak_lr": 0.25}])
    train(model, recorder, steps=4)
    peaks = [0.5, 0.25]
    factors = [rates[0] / peaks[0] for rates in recorder.rates]
    assert recorder.rates == [[peak * factor for peak in peaks] for factor in factors]
    assert factors[:2] == [0.5, 1.0]
    assert factors[2] > factors[3]


def poison(model, steps, value):
    """Multiply the head's gradient by `value` in these backward passes, counted from 0."""
    count = iter(range(10**6))
    model.lm_head.weight.register_hook(
        lambda gradient: gradient * value if next(count) in steps else gradient
    )


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_a_step_that_is_not_finite_never_happened(name, value):
    def result(run):
        model = demo()
        optimizer = build_inner_optimizer(name, model, lr=1e-2)
        report = run(model, optimizer)
        moments = [
            tensor
            for _, state in sorted(optimizer.state_dict()["state"].items())
            for _, tensor in sorted(state.items())
        ]
        return report, [*model.state_dict().values(), *moments]

    def skipped(model, optimizer):
        poison(model, {1}, value)
        return train(model, optimizer, steps=3)

    def left_out(model, optimizer):
        return [train(model, optimizer, first_step=step, steps=1) for step in (0, 2)]

    report, state = result(skipped)
    reports, expected = result(left_out)
    assert len(state) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(state, expected, strict=True))
    assert report.skipped_steps == 1
    assert report.tokens == 3 * 4 * 16
    assert report.mean_loss == pytest.approx(sum(one.mean_loss for one in reports) / 2)
    assert report.last_loss == reports[-1].last_loss
    assert math.isfinite(report.mean_gradient_norm)


def test_too_many_skipped_steps_in_a_row_are_an_error():
    model = demo()
    poison(model, {0, 2, 3, 4}, math.nan)
    optimizer = build_inner_optimizer("sgd", model, lr=1e-2)
    with pytest.raises(
        FloatingPointError, match="gradient of inner step 11 is nan: 3 steps in a row"
    ):
        train(model, optimizer, first_step=7, steps=6, max_skipped_steps=3)


def test_skipped_steps_that_are_not_in_a_row_are_counted():
    model = demo()
    poison(model, {0, 2, 3, 5}, math.nan)
    optimizer = build_inner_optimizer("sgd", model, lr=1e-2)
    report = train(model, optimizer, steps=6, max_skipped_steps=3)
    assert report.skipped_steps == 4


def test_a_round_without_any_step_is_an_error():
    model = demo()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    optimizer = build_inner_optimizer("sgd", model, lr=1.0)
    with pytest.raises(FloatingPointError, match="training loss of inner step 8 is nan: 2 steps"):
        train(model, optimizer, first_step=7, steps=2)


def test_bf16_computes_in_bf16_and_keeps_float32():
    exact, _ = gradients(clip_norm=1.0)
    low, _ = gradients(clip_norm=1.0, precision="bf16")
    error = (low - exact).norm() / exact.norm()
    assert 1e-4 < error < 3e-2
    model = demo()
    optimizer = build_inner_optimizer("adamw", model, lr=1e-2)
    report = train(model, optimizer, precision="bf16")
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in [*model.parameters(), *tensors]} == {torch.float32}
    assert 0 < report.mean_loss < 6


def test_auto_is_float32_without_a_gpu():
    assert torch.equal(gradients(precision="auto")[0], gradients()[0])


def test_only_the_batches_of_the_round_are_read_each_once():
    read = []

    def reading(step):
        read.append(step)
        return batch(step)

    model = demo()
    optimizer = build_inner_optimizer("sgd", model, lr=1e-2)
    report = run_inner_steps(model, optimizer, reading, first_step=4, steps=3, total_steps=20)
    assert read == [4, 5, 6]
    assert report.seconds > 0


def test_a_round_ends_before_its_time_is_over():
    read = []

    def slow(step):
        read.append(step)
        time.sleep(0.2)
        return batch(step)

    model = demo()
    optimizer = build_inner_optimizer("sgd", model, lr=1e-2)
    report = run_inner_steps(
        model, optimizer, slow, first_step=0, steps=50, total_steps=100, max_seconds=2.0
    )
    assert 1 <= report.steps < 10
    assert report.seconds < 2.0 or report.steps == 1
    assert report.tokens == report.steps * 4 * 16


def test_time_that_runs_out_with_no_step_taken_is_an_error():
    model = demo()
    poison(model, {0}, math.nan)
    optimizer = build_inner_optimizer("sgd", model, lr=1e-2)
    with pytest.raises(FloatingPointError, match="inner step 0 is nan: 1 steps in a row"):
        train(model, optimizer, max_seconds=1e-6)


def flushes():
    return (torch.tensor([1e-38]) * 0.1).item() == 0


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_subnormal_numbers_are_zero_during_the_steps_and_as_before_after_them(before, fails):
    seen = []
    model = demo()
    model.lm_head.weight.register_hook(lambda gradient: seen.append(flushes()))
    if fails:
        poison(model, {0}, math.nan)
    optimizer = build_inner_optimizer("sgd", model, lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: seen.append(flushes()))
    assert torch.set_flush_denormal(before)  # this processor can
    try:
        with pytest.raises(FloatingPointError) if fails else nullcontext():
            train(model, optimizer, steps=1)
        assert flushes() == before
    finally:
        torch.set_flush_denormal(False)
    assert seen == [True] * (1 if fails else 2)
