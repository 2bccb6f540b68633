"""Which parameter gets which rule, and that a worker's state of every optimizer can be kept."""

import re

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import build_model
from isoloco_flwr.pretraining.optimizers import build_inner_optimizer, hidden_matrices
from isoloco_flwr.pretraining.worker_state import load_worker_state, save_worker_state

NAMES = ["adamw", "muon", "sgd"]


def demo():
    return build_model("demo", vocabulary_size=257, seed=0)


def tied():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    return LlamaForCausalLM(config)


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )


def batch(step):
    return torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(step))


def train(model, optimizer, first_step=0, steps=2):
    run_inner_steps(model, optimizer, batch, first_step=first_step, steps=steps, total_steps=10)


@pytest.mark.parametrize("make", [demo, tied])
def test_muon_gets_exactly_q_k_v_o_gate_up_down(make):
    model = make()
    projections = [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    expected = {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(model.config.num_hidden_layers)
        for name in projections
    }
    assert set(hidden_matrices(model)) == expected
    optimizer = build_inner_optimizer("muon", model, lr=1e-2)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    with_muon = {
        named[id(parameter)]
        for group in optimizer.param_groups
        if "ns_steps" in group
        for parameter in group["params"]
    }
    assert with_muon == expected


def test_muon_leaves_gpt2s_embeddings_alone():
    names = {re.sub(r".*\.(\w+\.\w+)\.weight", r"\1", name) for name in hidden_matrices(gpt2())}
    assert names == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}


@pytest.mark.parametrize("make", [demo, tied, gpt2])
@pytest.mark.parametrize("name", NAMES)
def test_every_trained_parameter_is_in_one_group(name, make):
    model = make()
    frozen = model.get_input_embeddings().weight.requires_grad_(False)
    hidden = next(iter(hidden_matrices(model).values())).requires_grad_(False)
    optimizer = build_inner_optimizer(name, model, lr=1e-2)
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(value) for value in model.parameters() if value.requires_grad}
    assert id(frozen) not in grouped
    assert id(hidden) not in grouped
    assert {group["peak_lr"] for group in optimizer.param_groups} == {1e-2}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_matrices_decay_and_norms_and_biases_do_not(name):
    model = tied()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = build_inner_optimizer(name, model, lr=0.5, weight_decay=0.2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, value in model.named_parameters():
        factor = 1 - 0.5 * 0.2 if value.ndim == 2 else 1.0
        torch.testing.assert_close(value, factor * before[key])
    assert any("bias" in key for key in before)
    assert any("norm" in key for key in before)


def test_sgd_is_plain():
    model = tied()
    before = [value.detach().clone() for value in model.parameters()]
    optimizer = build_inner_optimizer("sgd", model, lr=0.5, weight_decay=0.2)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new, old - 1.0)


def test_muons_updates_are_as_large_as_adamws():
    model = demo()
    before = {name: value.detach().clone() for name, value in hidden_matrices(model).items()}
    optimizer = build_inner_optimizer("muon", model, lr=1e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    for name, value in hidden_matrices(model).items():
        update = (before[name] - value).detach() / 1e-3
        rms = update.square().mean().sqrt().item()
        assert rms == pytest.approx(0.2, rel=0.25), name  # Moonlight's match to AdamW
        # Nearly all directions alike: in the gradient their sizes are 20 times apart or more.
        small, large = torch.linalg.svdvals(update).quantile(torch.tensor([0.05, 0.95]))
        assert large / small < 2, name


def orthogonalized(matrix):
    """Take Muon's five iterations in float64."""
    wide = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    wide = wide / wide.norm()
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if wide.shape == matrix.shape else wide.T


def test_muon_with_adamw_is_each_on_its_own():
    """Three steps with MuLoCo's settings, Muon's written out in float64."""
    one, other = demo(), demo()
    optimizer = build_inner_optimizer("muon", one, lr=1e-2)
    hidden = {name: value.detach().double() for name, value in hidden_matrices(other).items()}
    momentum = {name: torch.zeros_like(value) for name, value in hidden.items()}
    rest = [value for name, value in other.named_parameters() if name not in hidden]
    adamw = torch.optim.AdamW(
        [
            {"params": [value for value in rest if value.ndim == 2], "weight_decay": 0.1},
            {"params": [value for value in rest if value.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for (name, mine), plain in zip(one.named_parameters(), other.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            plain.grad = mine.grad.clone()
            if name in hidden:
                momentum[name] = (
                    0.95 * momentum[name] + 0.05 * plain.grad
                )  # a scale changes nothing
                update = 0.2 * max(mine.shape) ** 0.5 * orthogonalized(momentum[name])
                hidden[name] = (1 - 1e-2 * 0.1) * hidden[name] - 1e-2 * update
        optimizer.step()
        adamw.step()
    for (name, mine), plain in zip(one.named_parameters(), other.parameters(), strict=True):
        if name in hidden:  # of the updates of 2e-3 no more than float32's rounding is off
            torch.testing.assert_close(mine.double(), hidden[name], rtol=0, atol=2e-6)
        else:
            assert torch.equal(mine, plain), name


@pytest.mark.parametrize("make", [demo, tied, gpt2])
@pytest.mark.parametrize("name", NAMES)
def test_a_kept_state_goes_on_as_if_never_left(name, make, tmp_path):
    unbroken = make()
    without_dropout(unbroken)
    optimizer = build_inner_optimizer(name, unbroken, lr=1e-2)
    train(unbroken, optimizer, 0, 4)

    model = make()
    without_dropout(model)
    first = build_inner_optimizer(name, model, lr=1e-2)
    train(model, first, 0, 2)
    save_worker_state(tmp_path, first, round_number=1)
    second = build_inner_optimizer(name, model, lr=1e-2)
    assert load_worker_state(tmp_path, second, round_number=1)
    train(model, second, 2, 2)
    for key, value in unbroken.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@pytest.mark.parametrize("name", NAMES)
def test_a_learning_rate_reaches_the_step_after_loading(name):
    model = demo()
    optimizer = build_inner_optimizer(name, model, lr=1e-2)
    train(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    before = [value.detach().clone() for value in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="'adam': allowed is one of adamw, muon, sgd"):
        build_inner_optimizer("adam", demo(), lr=1.0)
