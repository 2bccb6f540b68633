"""Replies are handed on as they come, and late ones never."""

import math
import time

import httpx
import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from rounds import LoopbackGrid, random_model, record

from isoloco_flwr import IsoLoCo
from isoloco_flwr.grid import StreamingGrid


class SlowGrid(LoopbackGrid):
    """Nodes answer after so many seconds each."""

    def __init__(self, delays):
        super().__init__(len(delays), work=lambda node, sent, config: sent)
        self.delays = delays
        self.pulled = []
        self.started = time.monotonic()

    def pull_messages(self, message_ids):
        ready = [
            message_id
            for message_id in message_ids
            if time.monotonic() - self.started
            >= self.delays[self._waiting[message_id].metadata.dst_node_id - 101]
        ]
        replies = super().pull_messages(ready)
        self.pulled += [reply.metadata.src_node_id for reply in replies]
        return replies


def questions(count):
    return [
        Message(
            RecordDict({"arrays": record(random_model(0)), "config": ConfigRecord()}),
            message_type=MessageType.TRAIN,
            dst_node_id=101 + place,
        )
        for place in range(count)
    ]


def nodes(replies):
    return [reply.metadata.src_node_id for reply in replies]


def test_each_reply_is_yielded_before_the_next_is_fetched():
    grid = SlowGrid([0, 0, 0])
    for seen, reply in enumerate(
        StreamingGrid(grid).send_and_receive(questions(3), timeout=10), start=1
    ):
        assert grid.pulled[-1] == reply.metadata.src_node_id
        assert len(grid.pulled) == seen
    assert seen == 3


def test_messages_are_sent_before_the_first_reply_is_asked_for():
    grid = SlowGrid([0])
    replies = StreamingGrid(grid).send_and_receive(questions(1))
    assert len(grid._waiting) == 1
    assert nodes(replies) == [101]


def test_the_quick_do_not_wait_for_the_slow():
    grid = SlowGrid([0.3, 0, 0.1])
    assert nodes(StreamingGrid(grid).send_and_receive(questions(3))) == [102, 103, 101]


def test_after_the_time_limit_nothing_is_fetched():
    grid = SlowGrid([0, 0.6])
    started = time.monotonic()
    assert nodes(StreamingGrid(grid).send_and_receive(questions(2), timeout=0.3)) == [101]
    assert time.monotonic() - started < 0.6
    time.sleep(0.5)
    assert grid.pulled == [101]


def test_the_last_reply_is_noticed_soon():
    grid = SlowGrid([1.6])
    assert nodes(StreamingGrid(grid).send_and_receive(questions(1))) == [101]
    assert time.monotonic() - grid.started < 1.6 + 0.5


def test_a_server_that_is_slow_to_say_no_is_asked_seldom():
    class Busy(SlowGrid):
        asked = 0

        def pull_messages(self, message_ids):
            self.asked += 1
            time.sleep(0.02)
            return super().pull_messages(message_ids)

    grid = Busy([1.5] * 5)
    assert len(nodes(StreamingGrid(grid).send_and_receive(questions(5)))) == 5
    assert grid.asked <= 3 * 5  # at once, after a second, and after another


def test_nothing_sent_is_nothing_awaited():
    assert nodes(StreamingGrid(SlowGrid([])).send_and_receive([], timeout=None)) == []


def test_a_client_over_the_limit_is_left_out_of_this_round_and_the_next():
    """Node 102 answers the first round during the second: that answer must not count there."""
    grid = SlowGrid([0, math.inf])
    strategy = IsoLoCo(fraction_evaluate=0.0)

    def evaluate(server_round, arrays):
        if server_round == 1:
            grid.delays[1] = 0  # from now on the late reply is there, and so is every later one

    result = strategy.start(
        grid, record(random_model(0)), num_rounds=2, timeout=0.2, evaluate_fn=evaluate
    )
    first, second = (result.train_metrics_clientapp[number] for number in (1, 2))
    assert first["replies-used"] == 1
    assert (second["replies-used"], second["replies-rejected"]) == (2, 0)
    assert grid.pulled == [101, 101, 102]


@pytest.mark.parametrize("seed", [0, 1])
def test_sampling_is_seeded_by_round(seed):
    def sample(seed):
        strategy = IsoLoCo(fraction_train=0.3, seed=seed)
        return [
            [
                message.metadata.dst_node_id
                for message in strategy.configure_train(
                    number, record(random_model(0)), ConfigRecord(), LoopbackGrid(20)
                )
            ]
            for number in (1, 2, 3)
        ]

    rounds = sample(seed)
    assert rounds == sample(seed)
    assert rounds != sample(seed + 1)
    assert rounds[0] != rounds[1]
    assert all(len(set(chosen)) == 6 for chosen in rounds)
    assert all(chosen == sorted(chosen) for chosen in rounds)


def test_too_few_nodes_end_the_wait_with_a_clear_message():
    strategy = IsoLoCo(min_train_nodes=3, min_available_nodes=3, node_timeout=0.0)
    with pytest.raises(TimeoutError, match=r"2 nodes are connected after 0 s, 3 are needed"):
        strategy.configure_train(1, record(random_model(0)), ConfigRecord(), LoopbackGrid(2))


def test_a_stragglers_config_keeps_its_round_number():
    strategy, config = IsoLoCo(), ConfigRecord({"lr": 0.1})
    grid = LoopbackGrid(2)
    first = strategy.configure_train(1, record(random_model(0)), config, grid)[0]
    strategy.configure_train(2, record(random_model(0)), config, grid)
    assert first.content["config"]["server-round"] == 1
    assert first.content["config"]["lr"] == 0.1


class WeakGrid(LoopbackGrid):
    """Answers with HTTP errors of these numbers first."""

    def __init__(self, *statuses):
        super().__init__(1, work=lambda node, sent, config: sent)
        self.statuses = list(statuses)

    def pull_messages(self, message_ids):
        if self.statuses:
            request = httpx.Request("POST", "http://superlink/v1/runtime/pull-messages")
            response = httpx.Response(self.statuses.pop(0), request=request)
            response.raise_for_status()
        return super().pull_messages(message_ids)


def test_a_superlink_that_fails_for_a_moment_is_asked_again():
    grid = StreamingGrid(WeakGrid(500, 503))
    assert nodes(grid.send_and_receive(questions(1), timeout=10)) == [101]


def test_a_superlink_that_refuses_is_not_asked_again():
    grid = StreamingGrid(WeakGrid(403))
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        list(grid.send_and_receive(questions(1), timeout=10))
