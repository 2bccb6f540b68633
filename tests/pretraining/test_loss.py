"""The loss in parts is the loss of all logits, and all logits are never there."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from isoloco_flwr.pretraining.loss import next_token_loss

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama(vocabulary=50, **options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **SHAPE, **options))


def phi():
    """Make a model whose head has a bias."""
    torch.manual_seed(0)
    model = PhiForCausalLM(PhiConfig(vocab_size=50, **SHAPE))
    torch.nn.init.normal_(model.lm_head.bias)
    return model.eval()


def gemma2():
    """Make a model whose logits are capped after the head."""
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(vocab_size=50, head_dim=8, final_logit_softcapping=0.5, **SHAPE)
    )


def cohere():
    """Make a model whose logits are scaled after the head."""
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(vocab_size=50, logit_scale=0.0625, **SHAPE))


def tokens(sequences, context, vocabulary=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (sequences, context + 1), generator=generator)


def plain_loss(model, batch):
    logits = model(input_ids=batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def with_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: value.grad.clone() for name, value in trained(model)}


def trained(model):
    return [(name, value) for name, value in model.named_parameters() if value.requires_grad]


def assert_same(model, batch, at_once, scale=1.0):
    expected_loss, expected = with_gradients(model, scale * plain_loss(model, batch))
    loss, gradients = with_gradients(
        model, scale * next_token_loss(model, batch, logits_at_once=at_once)
    )
    assert (loss - expected_loss).abs() < 1e-6 * expected_loss
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() < 1e-6, name
    assert max(value.abs().max() for value in expected.values()) > 1e-3
    with torch.no_grad():
        assert torch.allclose(
            scale * next_token_loss(model, batch, logits_at_once=at_once), loss, rtol=1e-6
        )


class Largest(TorchDispatchMode):
    """Sees the most elements of any tensor that is made inside."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        sizes = [value.numel() for value in tree_leaves(made) if isinstance(value, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


@settings(max_examples=40, deadline=None)
@given(
    sequences=st.integers(1, 4),
    context=st.integers(1, 9),
    vocabulary=st.integers(2, 300),
    at_once=st.integers(1, 3000),
    seed=st.integers(0, 2**16),
)
def test_loss_and_gradients_are_those_of_all_logits(sequences, context, vocabulary, at_once, seed):
    batch = tokens(sequences, context, vocabulary, seed)
    assert_same(llama(vocabulary), batch, at_once)


@pytest.mark.parametrize("make", [lambda: llama(tie_word_embeddings=True), phi, gemma2, cohere])
def test_tied_biased_capped_and_scaled_heads_have_their_own_loss(make):
    model = make()
    assert_same(model, tokens(3, 7), at_once=200)
    assert_same(model, tokens(3, 7), at_once=200, scale=3.0)


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_what_is_frozen_has_no_gradient(frozen):
    model = llama()
    getattr(model, frozen).requires_grad_(False)
    assert_same(model, tokens(3, 7), at_once=200)
    assert all(value.grad is None for value in getattr(model, frozen).parameters())


def largest_of(model, batch, **keywords):
    with Largest() as largest:
        next_token_loss(model, batch, **keywords).backward()
    return largest.elements


@pytest.mark.parametrize("make", [llama, phi])
def test_all_logits_never_exist(make):
    model = make()
    batch = tokens(8, 16)
    assert largest_of(model, batch, logits_at_once=1600) <= 128 * 24  # an activation of the MLP
    assert largest_of(model, batch) == 128 * 50  # all logits, where they are few


def test_the_default_bounds_the_logits_of_large_vocabularies():
    model = llama(32000)
    batch = tokens(3, 400, 32000)
    assert 32000 * 1000 < largest_of(model, batch) <= 2**25 < 3 * 400 * 32000


def test_the_models_mode_stays():
    model = llama().train()
    next_token_loss(model, tokens(2, 7), logits_at_once=100)
    assert model.training
    assert model.model.layers[0].training


def test_weights_that_are_not_finite_say_nothing_about_the_model():
    model = llama()
    healthy = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert next_token_loss(model, tokens(8, 16), logits_at_once=1600).isnan()
    model.load_state_dict(healthy)
    assert largest_of(model, tokens(8, 16), logits_at_once=1600) <= 128 * 24


def test_in_bf16_both_paths_agree_up_to_its_rounding():
    model = llama(300)
    batch = tokens(4, 16, 300)
    results = []
    for at_once in (2**20, 1000):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token_loss(model, batch, logits_at_once=at_once)
        assert loss.dtype == torch.float32
        results.append(with_gradients(model, loss))
    (whole, expected), (parts, gradients) = results
    assert (parts - whole).abs() < 1e-5 * whole
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert (gradient - expected[name]).norm() < 1e-2 * expected[name].norm(), name
