"""Meet the workers before the first round: how many there are, and whether each is ready."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import INFO

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from isoloco_flwr.grid import StreamingGrid

__all__ = ["WorkersNotReadyError", "meet_workers"]

_PATIENCE = 600.0
"""Seconds to wait for workers that have not connected or not answered."""


@dataclass(frozen=True)
class _Answer:
    """What a worker says of itself before the first round."""

    worker: int
    """Its place."""
    num_workers: int
    """R, as it knows it."""
    disk: str
    """A name for the disk that its state will lie on, the same for all workers on it."""
    state_bytes: int
    """Bytes that its states take at most."""
    free_bytes: int
    """Bytes that are free there."""


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
        If a worker reports an error, two claim one place, they disagree on R, not all R have
        answered in time, or a disk has no room for the states of its workers.
    """
    deadline = time.monotonic() + _PATIENCE
    places: dict[int, int] = {}
    answers: list[_Answer] = []
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
            answer = _read_answer(reply)
            if num_workers not in (0, answer.num_workers):
                raise WorkersNotReadyError(
                    f"workers disagree on num-partitions: {num_workers} and {answer.num_workers}"
                )
            if answer.worker in places:
                raise WorkersNotReadyError(
                    f"nodes {places[answer.worker]} and {reply.metadata.src_node_id} both have "
                    f"partition-id {answer.worker}: allowed is one node each"
                )
            num_workers = answer.num_workers
            places[answer.worker] = reply.metadata.src_node_id
            answers.append(answer)
        if len(places) != num_workers or not num_workers:
            time.sleep(0.2)
    _check_disks(answers)
    log(INFO, "%d workers are ready", num_workers)
    return num_workers


def _read_answer(reply: Message) -> _Answer:
    if reply.has_error():
        raise WorkersNotReadyError(
            f"node {reply.metadata.src_node_id} is not ready: {reply.error.reason}"
        )
    answer: Mapping[str, object] = reply.content["worker"]
    return _Answer(
        worker=int(str(answer["partition-id"])),
        num_workers=int(str(answer["num-partitions"])),
        disk=str(answer["disk"]),
        state_bytes=int(str(answer["state-bytes"])),
        free_bytes=int(str(answer["free-bytes"])),
    )


def _check_disks(answers: Sequence[_Answer]) -> None:
    """Say how much room the workers' states take, and refuse where there is less."""
    total = sum(answer.state_bytes for answer in answers)
    disks = {answer.disk for answer in answers}
    if total:
        log(INFO, "Workers' states take up to %.2f GB on %d disks", total / 1e9, len(disks))
    for disk in disks:
        on_it = [answer for answer in answers if answer.disk == disk]
        needed = sum(answer.state_bytes for answer in on_it)
        free = min(answer.free_bytes for answer in on_it)
        if needed > free:
            raise WorkersNotReadyError(
                f"the states of workers {', '.join(str(answer.worker) for answer in on_it)} take "
                f"up to {needed / 1e9:.2f} GB on one disk, where {free / 1e9:.2f} GB are free: "
                "allowed is more room ($ISOLOCO_CACHE names the folder), a smaller "
                "checkpoint.every, or inner.state = 'reset'"
            )
