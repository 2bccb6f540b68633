"""What a worker says of itself before it is sent anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import INFO

from flwr.app import Message
from flwr.supercore import log

__all__ = ["Introduction", "SitesNotReadyError", "check_disks", "read_introduction"]


class SitesNotReadyError(RuntimeError):
    """The workers cannot start; the message says which and why."""


@dataclass(frozen=True)
class Introduction:
    """What a worker says of itself before it is sent anything."""

    place: int
    """Its partition-id."""
    places: int
    """R, as it knows it."""
    device: str
    """Where it trains."""
    threads: int
    """Threads of its arithmetic."""
    disk: str
    """A name for the disk that its state will lie on, the same for all workers on it."""
    state_bytes: int
    """Bytes that its states take at most."""
    free_bytes: int
    """Bytes that are free there."""


def read_introduction(reply: Message) -> Introduction:
    """Read the answer to a query."""
    answer: Mapping[str, object] = reply.content["worker"]
    number = {
        key: int(str(answer[key]))
        for key in ("partition-id", "num-partitions", "threads", "state-bytes", "free-bytes")
    }
    return Introduction(
        place=number["partition-id"],
        places=number["num-partitions"],
        device=str(answer["device"]),
        threads=number["threads"],
        disk=str(answer["disk"]),
        state_bytes=number["state-bytes"],
        free_bytes=number["free-bytes"],
    )


def check_disks(answers: Sequence[Introduction]) -> None:
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
            raise SitesNotReadyError(
                f"the states of workers {', '.join(str(answer.place) for answer in on_it)} take "
                f"up to {needed / 1e9:.2f} GB on one disk, where {free / 1e9:.2f} GB are free: "
                "allowed is more room ($ISOLOCO_CACHE names the folder), a smaller "
                "checkpoint.every, or inner.state = 'reset'"
            )
