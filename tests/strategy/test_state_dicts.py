"""All kinds of tensors that a state_dict holds keep their dtype, shape and meaning."""

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from rounds import ask

from isoloco_flwr import TIES, DiLoCo, IsoLoCo, LocalSGD
from isoloco_flwr.records import record_from_tensors, tensors_from_record

PRESETS = [LocalSGD, DiLoCo, IsoLoCo, TIES]


def run_round(strategy, sent, workers, server_round=1):
    arrays = record_from_tensors(sent)
    messages = ask(strategy, arrays, num_nodes=len(workers), server_round=server_round)
    replies = [
        Message(
            RecordDict(
                {
                    "arrays": record_from_tensors(tensors),
                    "metrics": MetricRecord({"num-examples": 1}),
                }
            ),
            reply_to=message,
        )
        for message, tensors in zip(messages, workers, strict=True)
    ]
    arrays, metrics = strategy.aggregate_train(server_round, replies)
    assert metrics["replies-used"] == len(workers)
    return tensors_from_record(arrays)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_shapes_stay(preset, dtype):
    sent = {
        "matrix": torch.randn(4, 3).to(dtype),
        "kernel": torch.randn(2, 3, 3, 3).to(dtype),
        "scalar": torch.randn(()).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "counter": torch.tensor(7),
        "mask": torch.tensor([True, False]),
    }
    workers = [
        {
            name: value if not value.is_floating_point() else value * 1.5
            for name, value in sent.items()
        }
        for _ in range(3)
    ]
    result = run_round(preset(), sent, workers)
    for name, value in sent.items():
        assert (result[name].dtype, result[name].shape) == (value.dtype, value.shape)
    assert list(result) == list(sent)


def test_a_model_of_several_dtypes_is_stepped_in_each():
    sent = {"a": torch.ones(2, 2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.float64)}
    workers = [
        {"a": torch.full((2, 2), 0.5, dtype=torch.bfloat16), "b": torch.tensor([1.0, 2.0]).double()}
    ] * 2
    result = run_round(LocalSGD(outer_lr=1.0), sent, workers)
    assert torch.equal(result["a"], workers[0]["a"])
    assert torch.equal(result["b"], workers[0]["b"])


@pytest.mark.parametrize("preset", PRESETS)
def test_batch_norm_statistics_are_averaged_and_never_stepped(preset):
    strategy = preset()
    sent = {
        "bn.weight": torch.ones(2),
        "bn.running_mean": torch.zeros(2),
        "bn.running_var": torch.ones(2),
        "bn.num_batches_tracked": torch.tensor(10),
    }
    workers = [
        {
            **sent,
            "bn.running_mean": torch.tensor([1.0, -1.0]),
            "bn.num_batches_tracked": torch.tensor(15),
        },
        {
            **sent,
            "bn.running_mean": torch.tensor([3.0, -2.0]),
            "bn.num_batches_tracked": torch.tensor(20),
        },
    ]
    for server_round in (1, 2, 3):
        result = run_round(strategy, sent, workers, server_round)
        torch.testing.assert_close(result["bn.running_mean"], torch.tensor([2.0, -1.5]))
        assert torch.equal(result["bn.running_var"], torch.ones(2))
        # 17.5 is rounded to the even neighbour, as torch and NumPy round.
        assert result["bn.num_batches_tracked"] == 18
    assert set(strategy.engine.outer.state_dict()) <= {"bn.weight"}


def test_bools_take_the_majority():
    sent = {"mask": torch.tensor([True, False, True])}
    workers = [{"mask": torch.tensor(mask)} for mask in ([1, 0, 0], [1, 1, 0], [0, 1, 0])]
    workers = [{"mask": tensors["mask"].bool()} for tensors in workers]
    assert run_round(IsoLoCo(), sent, workers)["mask"].tolist() == [True, True, False]


def test_large_integers_are_exact():
    sent = {"counter": torch.tensor([2**52, -3])}
    workers = [{"counter": torch.tensor([2**52 + 1, -3])}] * 4
    assert run_round(IsoLoCo(), sent, workers)["counter"].tolist() == [2**52 + 1, -3]


@pytest.mark.parametrize("preset", PRESETS)
def test_frozen_parameters_are_untouched(preset):
    strategy = preset()
    sent = {"frozen": torch.randn(5, 4), "trained": torch.randn(5, 4)}
    for server_round in (1, 2, 3):
        workers = [{**sent, "trained": torch.randn(5, 4)} for _ in range(3)]
        result = run_round(strategy, sent, workers, server_round)
        assert torch.equal(result["frozen"], sent["frozen"])
        assert not torch.equal(result["trained"], sent["trained"])
        sent = {name: value.clone() for name, value in result.items()}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_strangers_tied_weights_stay_tied(preset):
    strategy = preset()
    shared = torch.randn(6, 4)
    sent = {"embed.weight": shared, "head.weight": shared}
    for server_round in (1, 2):
        steps = [torch.randn(6, 4) for _ in range(3)]
        workers = [{name: value + step for name, value in sent.items()} for step in steps]
        result = run_round(strategy, sent, workers, server_round)
        assert torch.equal(result["embed.weight"], result["head.weight"])
        sent = {name: value.clone() for name, value in result.items()}


def test_kernels_and_excluded_matrices_are_averaged_then_stepped():
    generator = torch.Generator().manual_seed(0)
    sent = {
        name: torch.randn(shape, generator=generator)
        for name, shape in {"kernel": (4, 3, 3, 3), "head": (5, 4), "body": (5, 4)}.items()
    }
    workers = [
        {
            name: value + torch.randn(value.shape, generator=generator)
            for name, value in sent.items()
        }
        for _ in range(3)
    ]
    merged = run_round(IsoLoCo(exclude=("head",)), sent, workers)
    averaged = run_round(DiLoCo(outer_lr=1.8, outer_momentum=0.8), sent, workers)
    assert torch.equal(merged["kernel"], averaged["kernel"])
    assert torch.equal(merged["head"], averaged["head"])
    assert not torch.allclose(merged["body"], averaged["body"])


def test_a_compiled_models_names_are_understood():
    sent = {"a.weight": torch.zeros(3, 2), "b": torch.zeros(2)}
    workers = [
        {f"_orig_mod.{name}": torch.ones_like(value) for name, value in sent.items()},
        {"a._orig_mod.weight": torch.ones(3, 2), "b": torch.ones(2)},
    ]
    result = run_round(LocalSGD(outer_lr=1.0), sent, workers)
    assert list(result) == ["a.weight", "b"]
    assert all(torch.equal(value, torch.ones_like(value)) for value in result.values())
