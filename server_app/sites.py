"""The workers of a run: who they are, which of them are there, and what becomes of them."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.supercore.run import Run

from isoloco_flwr.fields import SettingsError

__all__ = ["Sites", "SitesNotReadyError"]

_PATIENCE = 600.0
"""Seconds to wait for the first round's workers to connect and answer."""

_ASK_AGAIN = 60.0
"""Seconds after which a node is asked anew that was not ready or has not answered."""

_LOOK_AROUND = 2.0
"""Seconds between two looks at who is there."""

_NOBODY_ANSWERED = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}
"""Errors that the SuperLink answers with in place of a node that is gone."""


class SitesNotReadyError(RuntimeError):
    """The workers cannot start; the message says which and why."""


@dataclass(frozen=True)
class _Answer:
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


class Sites(Grid):
    """Wrap a Grid so that it shows the nodes that are ready, each in its place.

    A worker's place is its node's `partition-id` out of `num-partitions`; simulations set both,
    sites set them in their node config. Every node is asked once what it is before it is sent
    anything. It answers when its settings are checked and its text is read. While a round goes on
    nodes that connect are asked as well, so that they take part in the next one. A site that was
    restarted may come back as another node: it has its place again as soon as it answers.

    Parameters
    ----------
    grid : Grid
        The grid that a ServerApp was given.
    min_sites : int
        Workers that are enough to start; 0: all R, and whatever is wrong with one is an error.
    """

    def __init__(self, grid: Grid, *, min_sites: int) -> None:
        self._grid = grid
        self._min_sites = min_sites
        self._answers: dict[int, _Answer] = {}
        """What nodes have said, by node id."""
        self._places: dict[int, int] = {}
        """Node id by place."""
        self._asked: dict[int, tuple[float, str]] = {}
        """When nodes were asked that have not answered well yet, and the message, by node id."""
        self._waited_for: dict[str, int] = {}
        """Place by id of a message that was sent for training and has not been answered."""
        self._online: dict[int, NodeInfo] = {}
        self._last_look = -_LOOK_AROUND
        self._started = False

    def meet(self) -> int:
        """Wait until there are enough workers and return R, the number of places.

        Raises
        ------
        SitesNotReadyError
            If too few have answered in time, or a disk has no room for the states of its workers;
            with all R needed, also if one reports an error, two claim one place, or they disagree
            on R.
        """
        deadline = time.monotonic() + _PATIENCE
        while True:
            self._look_around()
            places = next(iter(self._answers.values())).places if self._answers else 0
            if self._min_sites > places > 0:
                raise SettingsError(
                    f"run-config key min-sites = {self._min_sites}: allowed is at most {places}, "
                    "the sites' num-partitions"
                )
            needed = self._min_sites or places
            if places and len(self._places) >= needed:
                break
            if time.monotonic() > deadline:
                raise SitesNotReadyError(
                    f"{len(self._places)} workers answered within {_PATIENCE:g} s, needed are "
                    f"{needed or 'at least 1'}"
                )
            time.sleep(0.2)
        answers = [self._answers[node_id] for node_id in self._places.values()]
        _check_disks(answers)
        self._started = True
        for (device, threads), count in sorted(Counter(map(_where, answers)).items()):
            log(
                INFO, "%d of %d workers are ready on %s, %d threads", count, places, device, threads
            )
        return places

    def set_run(self, run: Run) -> None:
        """Set the run of the wrapped grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run of the wrapped grid."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message through the wrapped grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online and ready, by place."""
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes that are online and ready.

        Their place stands in for the time of their registration, by which strategies number nodes:
        so a site has its number whenever it registered.
        """
        self._look_around()
        ready = []
        for place, node_id in sorted(self._places.items()):
            if node_id in self._online:
                node = NodeInfo()
                node.CopyFrom(self._online[node_id])
                node.registered_at = f"{place:09d}"
                ready.append(node)
        return ready

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages through the wrapped grid and remember to whom."""
        messages = list(messages)
        for place in sorted(self._waited_for.values()):
            log(WARNING, "Site %d has not answered in time, its round went on without it", place)
        places = {node_id: place for place, node_id in self._places.items()}
        message_ids = list(self._grid.push_messages(messages))
        self._waited_for = {
            message_id: places[message.metadata.dst_node_id]
            for message_id, message in zip(message_ids, messages, strict=True)
            if message.metadata.dst_node_id in places
        }
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch the replies that are there, and meet whoever has connected meanwhile."""
        if time.monotonic() > self._last_look + _LOOK_AROUND:
            self._look_around()
        replies = list(self._grid.pull_messages(message_ids))
        for reply in replies:
            place = self._waited_for.pop(reply.metadata.reply_to_message_id, None)
            if place is not None and reply.has_error():
                log(WARNING, "Site %d has an error: %s", place, _last_line(reply.error.reason))
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies, through the wrapped grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)

    def _look_around(self) -> None:
        """See who is online, ask those that are new and take in their answers."""
        self._last_look = now = time.monotonic()
        online = {node.node_id: node for node in self._grid.get_nodes()}
        if self._started:
            for place, node_id in sorted(self._places.items()):
                if (node_id in online) != (node_id in self._online):
                    change = "is back" if node_id in online else "is gone"
                    log(WARNING, "Site %d %s (node %d)", place, change, node_id)
        self._online = online
        questions = [
            Message(
                content=RecordDict(),
                message_type=MessageType.QUERY,
                dst_node_id=node_id,
                ttl=_PATIENCE,
            )
            for node_id in online
            if node_id not in self._answers
            and now > self._asked.get(node_id, (-_ASK_AGAIN, ""))[0] + _ASK_AGAIN
        ]
        if questions:
            for question, message_id in zip(
                questions, self._grid.push_messages(questions), strict=True
            ):
                self._asked[question.metadata.dst_node_id] = (now, message_id)
        open_questions = {
            message_id: node for node, (_, message_id) in self._asked.items() if message_id
        }
        if not open_questions:
            return
        for reply in self._grid.pull_messages(list(open_questions)):
            node_id = open_questions[reply.metadata.reply_to_message_id]
            self._asked[node_id] = (self._asked[node_id][0], "")
            self._take_in(node_id, reply)

    def _take_in(self, node_id: int, reply: Message) -> None:
        if reply.has_error():
            if reply.error.code not in _NOBODY_ANSWERED:
                self._refuse(f"node {node_id} is not ready: {_last_line(reply.error.reason)}")
            return
        answer = _read_answer(reply)
        for other in self._answers.values():
            if other.places != answer.places:
                self._refuse(
                    f"node {node_id} has num-partitions {answer.places}, others have {other.places}"
                )
                return
        before = self._places.get(answer.place)
        if before in self._online and not self._started:
            self._refuse(
                f"nodes {before} and {node_id} both have partition-id {answer.place}: allowed is "
                "one node each"
            )
        del self._asked[node_id]
        self._answers[node_id] = answer
        self._places[answer.place] = node_id
        if self._started:
            how = "is here" if before is None else "is back"
            log(WARNING, "Site %d %s as node %d, on %s", answer.place, how, node_id, answer.device)

    def _refuse(self, problem: str) -> None:
        """End a run that needs all of its workers; else say that one is left out."""
        if not self._min_sites and not self._started:
            raise SitesNotReadyError(problem)
        log(WARNING, "%s", problem)


def _read_answer(reply: Message) -> _Answer:
    answer: Mapping[str, object] = reply.content["worker"]
    number = {
        key: int(str(answer[key]))
        for key in ("partition-id", "num-partitions", "threads", "state-bytes", "free-bytes")
    }
    return _Answer(
        place=number["partition-id"],
        places=number["num-partitions"],
        device=str(answer["device"]),
        threads=number["threads"],
        disk=str(answer["disk"]),
        state_bytes=number["state-bytes"],
        free_bytes=number["free-bytes"],
    )


def _where(answer: _Answer) -> tuple[str, int]:
    return answer.device, answer.threads


def _last_line(reason: str | None) -> str:
    return ((reason or "").strip().splitlines() or [""])[-1]


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
            raise SitesNotReadyError(
                f"the states of workers {', '.join(str(answer.place) for answer in on_it)} take "
                f"up to {needed / 1e9:.2f} GB on one disk, where {free / 1e9:.2f} GB are free: "
                "allowed is more room ($ISOLOCO_CACHE names the folder), a smaller "
                "checkpoint.every, or inner.state = 'reset'"
            )
