"""Meet the workers before the first round: how many there are, and whether each is ready."""

import time
from collections.abc import Mapping
from logging import INFO

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from isoloco_flwr.grid import StreamingGrid

__all__ = ["WorkersNotReadyError", "meet_workers"]

_PATIENCE = 600.0
"""Seconds to wait for workers that have not connected or not answered."""


class WorkersNotReadyError(RuntimeError):
    """The workers cannot start; the message says which and why."""


def meet_workers(grid: Grid) -> int:
    """Ask every node who it is and return R, the number of workers.

    A worker's place is its node's `partition-id` out of `num-partitions`; simulations set both,
    sites set them in their node config. A worker answers once its settings are checked and its
    text is read, so that whatever is wrong there ends the run before any training.

    Raises
    ------
    WorkersNotReadyError
        If a worker reports an error, two claim one place, they disagree on R, or not all R have
        answered in time.
    """
    deadline = time.monotonic() + _PATIENCE
    places: dict[int, int] = {}
    num_workers = 0
    asked: set[int] = set()
    while not num_workers or len(places) < num_workers:
        new = [node_id for node_id in grid.get_node_ids() if node_id not in asked]
        asked.update(new)
        questions = [
            Message(content=RecordDict(), message_type=MessageType.QUERY, dst_node_id=node_id)
            for node_id in new
        ]
        timeout = deadline - time.monotonic()
        if timeout <= 0:
            raise WorkersNotReadyError(
                f"{len(places)} workers answered within {_PATIENCE:g} s, "
                f"needed are {num_workers or 'at least 1'}"
            )
        for reply in StreamingGrid(grid).send_and_receive(questions, timeout=timeout):
            worker, count = _read_answer(reply)
            if num_workers not in (0, count):
                raise WorkersNotReadyError(
                    f"workers disagree on num-partitions: {num_workers} and {count}"
                )
            if worker in places:
                raise WorkersNotReadyError(
                    f"nodes {places[worker]} and {reply.metadata.src_node_id} both have "
                    f"partition-id {worker}: allowed is one node each"
                )
            num_workers = count
            places[worker] = reply.metadata.src_node_id
        if len(places) != num_workers or not num_workers:
            time.sleep(0.2)
    log(INFO, "%d workers are ready", num_workers)
    return num_workers


def _read_answer(reply: Message) -> tuple[int, int]:
    if reply.has_error():
        raise WorkersNotReadyError(
            f"node {reply.metadata.src_node_id} is not ready: {reply.error.reason}"
        )
    answer: Mapping[str, object] = reply.content["worker"]
    return int(str(answer["partition-id"])), int(str(answer["num-partitions"]))
