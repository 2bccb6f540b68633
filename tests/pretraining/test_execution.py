"""Compilation and gradient checkpointing change neither numbers nor names."""

import copy
import shutil

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from isoloco_flwr.pretraining.execution import prepare_model, resolve_precision
from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import build_model, load_tensors, model_tensors
from isoloco_flwr.pretraining.optimizers import build_inner_optimizer


def batch(step):
    return torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(step))


def train(model):
    optimizer = build_inner_optimizer("sgd", model, lr=0.1)
    run_inner_steps(model, optimizer, batch, first_step=0, steps=3, total_steps=20)


def demo():
    return build_model("demo", vocabulary_size=257, seed=0)


def kept_for_backward(model):
    """Return how many elements one forward pass keeps, parameters aside."""
    own = {value.data_ptr() for value in model.parameters()}
    sizes = {}

    def pack(value):
        if value.data_ptr() not in own:
            sizes[value.data_ptr()] = value.numel()
        return value

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        model(input_ids=batch(0)[:, :-1], use_cache=False).logits.sum()
    return sum(sizes.values())


def test_gradient_checkpointing_saves_memory_and_changes_no_number():
    plain, saving = demo(), prepare_model(demo(), gradient_checkpointing=True)
    assert kept_for_backward(saving) < 0.5 * kept_for_backward(plain)
    train(plain)
    train(saving)
    for name, value in plain.state_dict().items():
        assert torch.equal(saving.state_dict()[name], value), name


def test_a_model_without_gradient_checkpointing_is_named():
    class Bare(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.zeros(1))

    model = Bare(PretrainedConfig())
    assert prepare_model(model) is model
    with pytest.raises(ValueError, match="Bare has none"):
        prepare_model(model, gradient_checkpointing=True)


def test_nothing_asked_for_changes_nothing():
    model = demo()
    expected = copy.deepcopy(model)
    before = torch.get_float32_matmul_precision()
    assert prepare_model(model) is model
    assert torch.get_float32_matmul_precision() == before  # TF32 is a GPU's
    train(model)
    train(expected)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize(("precision", "used"), [("auto", "fp32"), ("fp32", "fp32"), ("bf16",) * 2])
def test_precision_on_a_cpu(precision, used):
    assert resolve_precision(precision, torch.device("cpu")) == used


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="'fp16': allowed is one of auto, fp32, bf16"):
        resolve_precision("fp16", torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="compiling for a CPU needs a C++ compiler")
def test_a_compiled_model_stays_compiled_when_weights_are_loaded():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = demo(), demo()
    start = {name: value.clone() for name, value in model_tensors(eager).items()}
    prepare_model(compiled, compile=True)
    assert model_tensors(compiled).keys() == start.keys()
    train(eager)
    train(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for name, value in model_tensors(eager).items():
        torch.testing.assert_close(model_tensors(compiled)[name], value, rtol=1e-4, atol=1e-6)
    after = {name: value.clone() for name, value in model_tensors(compiled).items()}
    load_tensors(compiled, start)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(compiled)
    for name, value in model_tensors(compiled).items():
        assert torch.equal(value, after[name]), name
