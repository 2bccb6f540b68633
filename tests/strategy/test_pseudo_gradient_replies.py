"""A worker may answer with its pseudo-gradient, in 32 or 16 bits, in place of its parameters."""

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from rounds import ask, random_model, record, reply, tensors

from isoloco_flwr import MergeStrategy
from isoloco_flwr.merging import METHODS
from isoloco_flwr.records import pseudo_gradients, record_from_tensors

WORKERS = 4


def trained(sent, worker):
    """Move every value by a multiple of 2**-13: exact in all dtypes where it is small."""
    generator = torch.Generator().manual_seed(worker)
    return {
        name: value + torch.randint(-100, 101, value.shape, generator=generator) / 8192
        if value.is_floating_point()
        else value + worker
        for name, value in sent.items()
    }


def model():
    """Values are multiples of 2**-13 below 8, so that a step of `trained` is exact in float32."""
    sent = {name: (value * 8192).round() / 8192 for name, value in random_model(0).items()}
    return {**sent, "steps": torch.tensor([3, 4]), "double": sent["tall"].double()}


def as_pseudo_gradient(message, sent, worker, dtype):
    differences = pseudo_gradients(sent, trained(sent, worker), dtype)
    content = {
        "pseudo-gradient": record_from_tensors(differences),
        "metrics": MetricRecord({"num-examples": 1}),
    }
    return Message(RecordDict(content), reply_to=message)


def rounds(method, answer):
    strategy = MergeStrategy(merge=method, outer_lr=0.7, outer_momentum=0.9)
    arrays = record(model())
    for number in (1, 2):
        messages = ask(strategy, arrays, num_nodes=WORKERS, server_round=number)
        sent = tensors(arrays)
        replies = [answer(message, sent, worker) for worker, message in enumerate(messages)]
        arrays, metrics = strategy.aggregate_train(number, replies)
        assert metrics["replies-used"] == WORKERS
    return tensors(arrays), metrics


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)],
    ids=str,
)
def test_both_forms_give_one_model_up_to_the_rounding(method, dtype, tolerance):
    full, _ = rounds(method, lambda message, sent, w: reply(message, trained(sent, w)))
    short, _ = rounds(method, lambda message, sent, w: as_pseudo_gradient(message, sent, w, dtype))
    assert short.keys() == full.keys()
    for name, value in full.items():
        assert short[name].dtype == value.dtype
        if value.is_floating_point():
            # The rounding is relative to the steps, which are up to 100 / 8192 long.
            moved = (value - model()[name]).abs().max()
            assert (short[name] - value).abs().max() <= tolerance * moved
        else:
            assert torch.equal(short[name], value)


def test_16_bits_halve_the_bytes():
    up = {}
    for dtype in (torch.float32, torch.bfloat16):
        sent = {"weight": torch.ones(200, 300)}
        strategy = MergeStrategy(merge="mean")
        messages = ask(strategy, record(sent), num_nodes=2)
        replies = [as_pseudo_gradient(message, sent, 0, dtype) for message in messages]
        _, metrics = strategy.aggregate_train(1, replies)
        up[dtype] = metrics["bytes-up"]
    assert up[torch.float32] == pytest.approx(2 * up[torch.bfloat16], rel=0.01)


def test_an_integer_tensor_cannot_come_as_a_float():
    sent = {"steps": torch.tensor([3, 4])}
    strategy = MergeStrategy(merge="mean")
    messages = ask(strategy, record(sent), num_nodes=2)
    bad = RecordDict(
        {
            "pseudo-gradient": record_from_tensors({"steps": torch.zeros(2)}),
            "metrics": MetricRecord({"num-examples": 1}),
        }
    )
    good = reply(messages[0], {"steps": torch.tensor([5, 6])})
    arrays, metrics = strategy.aggregate_train(1, [good, Message(bad, reply_to=messages[1])])
    assert metrics["replies-rejected"] == 1
    assert tensors(arrays)["steps"].tolist() == [5, 6]


def test_a_pseudo_gradient_in_16_bits_that_overflows_is_left_out():
    sent = {"weight": torch.zeros(2, 2)}
    strategy = MergeStrategy(merge="mean")
    messages = ask(strategy, record(sent), num_nodes=2)
    differences = dict(pseudo_gradients(sent, {"weight": torch.full((2, 2), 1e5)}, torch.float16))
    bad = RecordDict({"pseudo-gradient": record_from_tensors(differences)})
    replies = [
        reply(messages[0], {"weight": torch.ones(2, 2)}),
        Message(bad, reply_to=messages[1]),
    ]
    _, metrics = strategy.aggregate_train(1, replies)
    assert (metrics["replies-used"], metrics["replies-rejected"]) == (1, 1)
