"""The held-out loss is the mean over evenly spaced sequences."""

import math

import numpy as np
import pytest
import torch

from isoloco_flwr.pretraining.evaluate import held_out_loss
from isoloco_flwr.pretraining.loss import next_token_loss
from isoloco_flwr.pretraining.model import build_model

TOKENS = np.random.default_rng(0).integers(0, 257, size=8 * 10 + 1).astype(np.uint16)


@pytest.fixture(scope="module")
def model():
    return build_model("demo", vocabulary_size=257, seed=0)


@pytest.mark.parametrize("tokens_at_once", [1, 3 * 8 + 7, 8192])
def test_all_sequences_are_read_once(model, tokens_at_once):
    rows = torch.from_numpy(TOKENS.astype(np.int64)).unfold(0, 9, 8)
    assert len(rows) == 10
    with torch.no_grad():
        expected = sum(next_token_loss(model, row[None]).item() for row in rows) / 10
    loss = held_out_loss(model, TOKENS, context=8, tokens_at_once=tokens_at_once)
    assert loss == pytest.approx(expected, rel=1e-6)


def test_no_batch_has_more_tokens_than_asked_for(model):
    sizes = []
    handle = model.register_forward_pre_hook(
        lambda module, positional, named: sizes.append(named["input_ids"].numel()),
        with_kwargs=True,
    )
    held_out_loss(model, TOKENS, context=8, tokens_at_once=31)
    handle.remove()
    assert sizes == [24, 24, 24, 8]


def test_a_part_is_spread_over_the_text(model):
    with torch.no_grad():
        rows = [TOKENS[start : start + 9].astype(np.int64) for start in (0, 40)]
        expected = next_token_loss(model, torch.from_numpy(np.stack(rows))).item()
    loss = held_out_loss(model, TOKENS, context=8, max_sequences=2)
    assert loss == pytest.approx(expected, rel=1e-6)


def test_an_untrained_model_knows_nothing(model):
    assert held_out_loss(model, TOKENS, context=8) == pytest.approx(math.log(257), rel=0.02)


def test_the_model_is_not_changed(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held_out_loss(model, TOKENS, context=8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_too_little_text_is_said_in_numbers(model):
    with pytest.raises(ValueError, match="8 held-out tokens are too few: needed are 9"):
        held_out_loss(model, TOKENS[:8], context=8)
