"""Twenty inner steps are those of the plain script anybody would write, bit for bit."""

import math

import pytest
import torch

from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import build_model
from isoloco_flwr.pretraining.optimizers import build_inner_optimizer

STEPS = 20


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(257, (3, 17), generator=generator)


def plain_script():
    """Train with nothing of this project but the model and the data."""
    model = build_model("demo", vocabulary_size=257, seed=1)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    losses = []
    gradient_norms = []
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
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        gradient_norms.append(norm.item())
    return model, losses, gradient_norms


def test_twenty_steps_equal_a_plain_script():
    expected, losses, norms = plain_script()
    assert max(norms) > 1.0  # some step is clipped
    model = build_model("demo", vocabulary_size=257, seed=1)
    optimizer = build_inner_optimizer("adamw", model, lr=4e-3)
    report = run_inner_steps(model, optimizer, batch, first_step=0, steps=STEPS, total_steps=STEPS)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert report.mean_loss == pytest.approx(sum(losses) / STEPS, rel=1e-12)
    assert report.last_loss == losses[-1]
    assert report.mean_gradient_norm == pytest.approx(sum(norms) / STEPS, rel=1e-12)
    assert report.tokens == STEPS * 3 * 16
    assert report.skipped_steps == 0
