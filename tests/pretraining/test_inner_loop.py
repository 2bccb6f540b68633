"""The inner loop is the plain loop anybody would write, bit for bit."""

import math

import pytest
import torch

from isoloco_flwr.pretraining.inner_loop import build_inner_optimizer, run_inner_steps
from isoloco_flwr.pretraining.model import build_model

STEPS = 20


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(257, (3, 17), generator=generator)


def plain_loop():
    """Train as a script would, with nothing of this project but the model and the data."""
    model = build_model("demo", vocabulary_size=257, seed=1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    losses = []
    norms = []
    for step in range(STEPS):
        warmup = 2
        if step < warmup:
            lr = 4e-3 * ((step + 1) / warmup)
        else:
            part = (step + 1 - warmup) / (STEPS + 1 - warmup)
            lr = 4e-3 * (0.5 * (1 + math.cos(math.pi * part)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        tokens = batch(step)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 257), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norms


def test_twenty_steps_equal_a_plain_script():
    expected, losses, norms = plain_loop()
    assert max(norms) > 1.0  # some step is clipped
    model = build_model("demo", vocabulary_size=257, seed=1)
    optimizer = build_inner_optimizer("adamw", model.parameters(), lr=4e-3)
    report = run_inner_steps(
        model, optimizer, batch, first_step=0, steps=STEPS, total_steps=STEPS, lr=4e-3
    )
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert report.mean_loss == pytest.approx(sum(losses) / STEPS, rel=1e-12)
    assert report.last_loss == losses[-1]
    assert report.mean_gradient_norm == pytest.approx(sum(norms) / STEPS, rel=1e-12)
    assert report.tokens == STEPS * 3 * 16


def test_a_loss_that_is_not_finite_is_an_error():
    model = build_model("demo", vocabulary_size=257, seed=1)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    optimizer = build_inner_optimizer("sgd", model.parameters(), lr=1.0)
    with pytest.raises(FloatingPointError, match="inner step 7 is nan"):
        run_inner_steps(model, optimizer, batch, first_step=7, steps=2, total_steps=20, lr=1.0)


def test_a_gradient_that_is_not_finite_is_an_error_even_in_the_last_step():
    model = build_model("demo", vocabulary_size=257, seed=1)
    model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    optimizer = build_inner_optimizer("adamw", model.parameters(), lr=1e-3)
    with pytest.raises(FloatingPointError, match=r"the gradient of inner step 7 is (inf|nan)"):
        run_inner_steps(model, optimizer, batch, first_step=7, steps=1, total_steps=20, lr=1e-3)


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="'adam': allowed is one of adamw, sgd"):
        build_inner_optimizer("adam", [torch.nn.Parameter(torch.zeros(1))], lr=1.0)
