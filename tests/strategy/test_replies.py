"""A reply is checked alone: a bad one is counted and never touches the model."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import AggregationError
from rounds import ask, random_model, record, reply, tensors

from isoloco_flwr import IsoLoCo
from isoloco_flwr.aggregation import MeanAccumulator

MODEL = random_model(0)


def worker_model(worker):
    step = random_model(worker + 1)
    return {name: value - 0.1 * step[name] for name, value in MODEL.items()}


def changed(worker, **tensors_):
    return {**worker_model(worker), **tensors_}


def error_reply(message):
    return Message(Error(code=1, reason="out of memory"), reply_to=message)


def without(name):
    return lambda message: reply(
        message, {key: value for key, value in worker_model(2).items() if key != name}
    )


def with_tensor(name, value):
    return lambda message: reply(message, changed(2, **{name: value}))


def garbage(message):
    answer = reply(message, worker_model(2))
    answer.content["arrays"]["tall"] = Array("float32", (9, 5), "numpy.ndarray", b"garbage")
    return answer


def two_records(message):
    answer = reply(message, worker_model(2))
    answer.content["more"] = ArrayRecord(worker_model(2))
    return answer


def no_record(message):
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


BAD = {
    "error": error_reply,
    "nan": with_tensor("tall", torch.full((9, 5), math.nan)),
    "inf in the last tensor": with_tensor("scalar", torch.tensor(math.inf)),
    "missing": without("vector"),
    "extra": with_tensor("more", torch.zeros(2)),
    "shape": with_tensor("vector", torch.zeros(8)),
    "rank": with_tensor("scalar", torch.zeros(1)),
    "dtype": with_tensor("vector", torch.zeros(7, dtype=torch.float64)),
    "garbage": garbage,
    "two records": two_records,
    "no record": no_record,
}


def aggregate(strategy, bad=None, places=(0, 1, 3), bad_place=2, weights=None, hand_over=list):
    """Run a round of good replies at `places`, and perhaps a bad one at `bad_place`."""
    messages = ask(strategy, record(MODEL), num_nodes=4)
    replies = [
        reply(
            messages[place],
            worker_model(place),
            None if weights is None else {"num-examples": weights[place]},
        )
        for place in places
    ]
    if bad is not None:
        replies.insert(1, bad(messages[bad_place]))
    return strategy.aggregate_train(1, hand_over(replies))


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].data == second[name].data, name


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_reply_leaves_no_trace(bad):
    strategy, undisturbed = IsoLoCo(), IsoLoCo()
    arrays, metrics = aggregate(strategy, bad)
    expected, expected_metrics = aggregate(undisturbed)
    assert_same_bits(arrays, expected)
    for name, buffer in undisturbed.engine.outer.state_dict().items():
        assert torch.equal(strategy.engine.outer.state_dict()[name], buffer)
    assert (metrics["replies-used"], metrics["replies-rejected"]) == (3, 1)
    assert (expected_metrics["replies-used"], expected_metrics["replies-rejected"]) == (3, 0)


def test_a_good_reply_does_leave_one():
    arrays, _ = aggregate(IsoLoCo(), bad=lambda message: reply(message, worker_model(2)))
    expected, _ = aggregate(IsoLoCo())
    assert not np.array_equal(arrays["tall"].numpy(), expected["tall"].numpy())


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, [1, 2]])
def test_a_bad_weight_is_rejected_when_replies_are_weighed(weight):
    def bad(message):
        return reply(message, worker_model(2), {"num-examples": weight})

    arrays, metrics = aggregate(IsoLoCo(weighting="examples"), bad)
    expected, _ = aggregate(IsoLoCo(weighting="examples"))
    assert_same_bits(arrays, expected)
    assert metrics["replies-rejected"] == 1


def test_without_a_weight_a_reply_counts_only_where_weights_do_not():
    def bad(message):
        return reply(message, worker_model(2), {"loss": 1.0})

    _, metrics = aggregate(IsoLoCo(weighting="examples"), bad)
    assert metrics["replies-rejected"] == 1
    _, metrics = aggregate(IsoLoCo(weighting="uniform"), bad)
    assert metrics["replies-used"] == 4


def test_too_few_good_replies_skip_the_round():
    strategy = IsoLoCo(min_train_replies=3)
    aggregate(strategy)
    momentum = {name: buffer.clone() for name, buffer in strategy.engine.outer.state_dict().items()}
    arrays, metrics = aggregate(strategy, BAD["nan"], places=(0, 1))
    assert arrays is None
    assert (metrics["replies-used"], metrics["replies-rejected"]) == (2, 1)
    for name, buffer in strategy.engine.outer.state_dict().items():
        assert torch.equal(momentum[name], buffer)


def test_weights_that_add_up_to_nothing_skip_the_round():
    strategy = IsoLoCo(weighting="examples")
    arrays, _ = aggregate(strategy, weights=[0, 0, 0, 0])
    assert arrays is None
    assert strategy.engine.outer.state_dict() == {}


def test_pseudo_gradients_that_overflow_skip_the_round():
    strategy = IsoLoCo()
    huge = {"weight": torch.full((2, 2), 3e38)}
    messages = ask(strategy, record(huge), num_nodes=2)
    arrays, _ = strategy.aggregate_train(
        1, [reply(message, {"weight": -huge["weight"]}) for message in messages]
    )
    assert arrays is None
    assert strategy.engine.outer.state_dict() == {}


def test_a_second_reply_and_a_strangers_are_rejected():
    strategy = IsoLoCo()
    messages = ask(strategy, record(MODEL), num_nodes=3)
    replies = [reply(message, worker_model(place)) for place, message in enumerate(messages)]
    again = reply(messages[0], worker_model(9))
    stranger = reply(messages[1], worker_model(9))
    stranger.metadata.__dict__["_src_node_id"] = 999
    arrays, metrics = strategy.aggregate_train(1, [replies[0], again, stranger, *replies[1:]])
    undisturbed = IsoLoCo()
    messages = ask(undisturbed, record(MODEL), num_nodes=3)
    expected, _ = undisturbed.aggregate_train(
        1, [reply(message, worker_model(place)) for place, message in enumerate(messages)]
    )
    assert_same_bits(arrays, expected)
    assert (metrics["replies-used"], metrics["replies-rejected"]) == (3, 2)


def test_a_reply_to_another_round_is_rejected():
    strategy = IsoLoCo(min_train_replies=2)
    late = reply(ask(strategy, record(MODEL), num_nodes=2, server_round=1)[0], worker_model(0))
    messages = ask(strategy, record(MODEL), num_nodes=2, server_round=2)
    arrays, metrics = strategy.aggregate_train(2, [late, reply(messages[1], worker_model(1))])
    assert arrays is None
    assert (metrics["replies-used"], metrics["replies-rejected"]) == (1, 1)


def test_replies_without_a_round_are_an_error():
    strategy = IsoLoCo()
    message = ask(strategy, record(MODEL), num_nodes=2)[0]
    with pytest.raises(AggregationError, match=r"round 5.*prepared round 1"):
        strategy.aggregate_train(5, [reply(message, worker_model(0))])


@pytest.mark.parametrize("bytes_in_memory", [64 << 20, 300, 0])
@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 3, 0, 2)])
@pytest.mark.parametrize("hand_over", [iter, list])
def test_the_order_of_arrival_changes_no_bit(order, bytes_in_memory, hand_over, monkeypatch):
    monkeypatch.setattr("isoloco_flwr.aggregation._WAITING_BYTES", bytes_in_memory)
    expected, _ = aggregate(IsoLoCo(), places=(0, 1, 2, 3))
    arrays, _ = aggregate(IsoLoCo(), places=order, hand_over=hand_over)
    assert_same_bits(arrays, expected)


def test_no_reply_of_a_list_waits_for_its_turn_on_disk(monkeypatch):
    monkeypatch.setattr("isoloco_flwr.aggregation._WAITING_BYTES", 0)
    monkeypatch.setattr("isoloco_flwr.engine.on_disk", pytest.fail)
    _, metrics = aggregate(IsoLoCo(), places=(3, 1))
    assert metrics["replies-used"] == 2


def test_a_reply_is_freed_at_once_and_not_when_python_looks_for_cycles():
    strategy = IsoLoCo()
    messages = ask(strategy, record(MODEL), num_nodes=4)
    alive = []

    def replies():
        for place, message in enumerate(messages):
            answer = reply(message, worker_model(place))
            alive.append(weakref.ref(answer.content))
            yield answer
            del answer
            assert [one() for one in alive] == [None] * len(alive)

    gc.collect()
    gc.disable()
    try:
        _, metrics = strategy.aggregate_train(1, replies())
    finally:
        gc.enable()
    assert metrics["replies-used"] == 4


def test_the_reply_that_others_waited_for_is_freed_before_they_are_added(monkeypatch):
    monkeypatch.setattr("isoloco_flwr.aggregation._PENDING_BYTES", 1)
    added = []
    add = MeanAccumulator.add

    def watched_add(self, position, reply):
        assert [one() for _, one in added] == [None] * len(added)
        added.append((position, weakref.ref(reply)))
        add(self, position, reply)

    monkeypatch.setattr(MeanAccumulator, "add", watched_add)
    strategy = IsoLoCo()
    messages = ask(strategy, record(MODEL), num_nodes=4)
    strategy.aggregate_train(
        1, (reply(messages[place], worker_model(place)) for place in (1, 2, 3, 0))
    )
    assert [position for position, _ in added] == [0, 1, 2, 3]


def test_the_model_sent_is_left_as_it_was():
    sent = record(MODEL)
    before = {name: array.data for name, array in sent.items()}
    strategy = IsoLoCo()
    messages = ask(strategy, sent, num_nodes=2)
    strategy.aggregate_train(1, [reply(message, worker_model(0)) for message in messages])
    assert {name: array.data for name, array in sent.items()} == before
    for name, value in tensors(sent).items():
        assert torch.equal(value, MODEL[name])
