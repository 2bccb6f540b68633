"""A round of a strategy without processes: messages out to made-up nodes, replies by hand."""

from collections.abc import Callable, Iterable, Mapping
from uuid import uuid4

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

Work = Callable[[int, dict[str, Tensor], ConfigRecord], Mapping[str, Tensor]]


class LoopbackGrid(Grid):
    """A grid whose nodes 101, 102, ... live in this process and answer at once.

    Without `work` it only hands out message ids: the test writes the replies.
    """

    def __init__(self, num_nodes: int, work: Work | None = None) -> None:
        self._node_ids = [101 + place for place in range(num_nodes)]
        self._work = work
        self._waiting: dict[str, Message] = {}

    def set_run(self, run) -> None:
        raise AssertionError("a test has no run")

    @property
    def run(self):
        raise AssertionError("a test has no run")

    def create_message(self, *args, **keywords):
        raise AssertionError("deprecated")

    def get_node_ids(self) -> Iterable[int]:
        return self._node_ids

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=node_id, registered_at=f"2026-01-01T00:00:00.{place:06d}")
            for place, node_id in enumerate(self._node_ids)
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        message_ids = []
        for message in messages:
            message_ids.append(str(uuid4()))
            message.metadata.__dict__["_message_id"] = message_ids[-1]
            self._waiting[message_ids[-1]] = message
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            message = self._waiting.pop(message_id)
            node = message.metadata.dst_node_id - 101
            sent = tensors(message.content["arrays"])
            replies.append(reply(message, self._work(node, sent, message.content["config"])))
        return replies

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))


def ask(
    strategy: FedAvg, arrays: ArrayRecord, *, num_nodes: int, server_round: int = 1
) -> list[Message]:
    """Let a strategy configure a round for nodes 101, 102, ... and give its messages ids."""
    grid = LoopbackGrid(num_nodes)
    messages = list(strategy.configure_train(server_round, arrays, ConfigRecord(), grid))
    grid.push_messages(messages)
    return messages


def reply(
    message: Message,
    tensors: Mapping[str, Tensor | np.ndarray],
    metrics: Mapping[str, float] | None = None,
) -> Message:
    """Answer a message with full parameters, serialised by Flower itself."""
    arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in tensors.items()})
    record = MetricRecord({"num-examples": 1} if metrics is None else dict(metrics))
    return Message(RecordDict({"arrays": arrays, "metrics": record}), reply_to=message)


def record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Serialise named tensors with Flower's own code."""
    return ArrayRecord(dict(tensors))


def tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    """Read a record with Flower's own code."""
    return dict(arrays.to_torch_state_dict())


def random_model(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Make a few parameters of every rank."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {"tall": draw(9, 5), "wide": draw(4, 11), "vector": draw(7), "scalar": draw()}
