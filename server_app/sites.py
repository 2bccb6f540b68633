"""The workers of a run: who they are, which of them are there, and what becomes of them."""

import math
import time
from collections import Counter
from collections.abc import Iterable
from logging import INFO, WARNING

from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log

from isoloco_flwr.fields import SettingsError
from isoloco_flwr.grid import WrappedGrid, forgiven
from server_app.introduction import (
    Introduction,
    SitesNotReadyError,
    check_disks,
    read_introduction,
)

__all__ = ["Sites", "SitesNotReadyError"]

_PATIENCE = 600.0
"""Seconds to wait for the first round's workers to connect and answer."""

_ASK_AGAIN = 60.0
"""Seconds after which a node is asked anew that was not ready."""

_LOOK_AROUND = 2.0
"""Seconds between two looks at who is there."""

_NOBODY_ANSWERED = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}
"""Errors that the SuperLink answers with in place of a node that is gone."""

_LATE = "Site %d has not answered in time, its round goes on without it"


class Sites(WrappedGrid):
    """Wrap a Grid so that it shows the nodes that are ready, each in its place.

    A worker's place is its node's `partition-id` out of `num-partitions`; simulations set both,
    sites set them in their node config. Every node is asked once what it is before it is sent
    anything. It answers when its settings are checked and its text is read. While a round goes on
    nodes that connect are asked as well, so that they take part in the next one. A site that was
    restarted, as the same node or another, is asked anew and has its place again once it answers.

    Parameters
    ----------
    grid : Grid
        The grid that a ServerApp was given.
    min_sites : int
        Workers that are enough to start; 0: all R, and whatever is wrong with one is an error.
    """

    def __init__(self, grid: Grid, *, min_sites: int) -> None:
        super().__init__(grid)
        self._min_sites = min_sites
        self._answers: dict[int, Introduction] = {}
        """What nodes have said, by node id."""
        self._places: dict[int, int] = {}
        """Node id by place."""
        self._asked: dict[int, tuple[float, str]] = {}
        """When nodes were asked that have not answered well yet, and the message, by node id."""
        self._waited_for: dict[str, int] = {}
        """Place by id of a message that was sent for training and has not been answered."""
        self._online: dict[int, NodeInfo] = {}
        """Nodes that were online at the last look, by node id."""
        self._activated: dict[int, str] = {}
        """When nodes were started that have been asked, by node id."""
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
            if places and len(self._ready()) >= needed:
                break
            if time.monotonic() > deadline:
                raise SitesNotReadyError(
                    f"{len(self._ready())} workers answered within {_PATIENCE:g} s, needed are "
                    f"{needed or 'at least 1'}"
                )
            time.sleep(0.2)
        answers = [self._answers[node_id] for node_id in self._ready().values()]
        check_disks(answers)
        self._started = True
        for (device, threads), count in sorted(Counter(map(_where, answers)).items()):
            log(
                INFO, "%d of %d workers are ready on %s, %d threads", count, places, device, threads
            )
        return places

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
        for place, node_id in sorted(self._ready().items()):
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
            log(WARNING, _LATE, place)
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
            if place is None or not reply.has_error():
                continue
            if reply.error.code in _NOBODY_ANSWERED:
                log(WARNING, _LATE, place)
            else:
                log(WARNING, "Site %d has an error: %s", place, _last_line(reply.error.reason))
        return replies

    def _look_around(self) -> None:
        """See who is online, ask those that are new and take in their answers."""
        self._last_look = time.monotonic()
        with forgiven("say who is online"):
            self._meet_nodes(self._last_look)

    def _meet_nodes(self, now: float) -> None:
        online = {node.node_id: node for node in self._grid.get_nodes()}
        if self._started:
            for place, node_id in sorted(self._places.items()):
                if (node_id in online) != (node_id in self._online):
                    change = "is back" if node_id in online else "is gone"
                    log(WARNING, "Site %d %s (node %d)", place, change, node_id)
        self._online = online
        for node_id, node in online.items():
            started = node.last_activated_at
            if self._activated.setdefault(node_id, started) != started:
                # It was restarted: what it was asked is lost, and what it said may not hold.
                self._activated[node_id] = started
                self._answers.pop(node_id, None)
                self._asked.pop(node_id, None)
        questions = [
            Message(
                content=RecordDict(),
                message_type=MessageType.QUERY,
                dst_node_id=node_id,
                ttl=_PATIENCE,
            )
            for node_id in online
            if node_id not in self._answers and self._is_to_be_asked(node_id, now)
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

    def _ready(self) -> dict[int, int]:
        """Return the node of each place that has one, if it has answered since its start."""
        return {place: node for place, node in self._places.items() if node in self._answers}

    def _is_to_be_asked(self, node_id: int, now: float) -> bool:
        when, open_question = self._asked.get(node_id, (-math.inf, ""))
        return now > when + (_PATIENCE if open_question else _ASK_AGAIN)

    def _take_in(self, node_id: int, reply: Message) -> None:
        if reply.has_error():
            if reply.error.code not in _NOBODY_ANSWERED:
                self._refuse(f"node {node_id} is not ready: {_last_line(reply.error.reason)}")
            return
        answer = read_introduction(reply)
        for other in self._answers.values():
            if other.places != answer.places:
                self._refuse(
                    f"node {node_id} has num-partitions {answer.places}, others have {other.places}"
                )
                return
        before = self._places.get(answer.place)
        if before in self._online and before != node_id and not self._started:
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


def _where(answer: Introduction) -> tuple[str, int]:
    return answer.device, answer.threads


def _last_line(reason: str | None) -> str:
    return ((reason or "").strip().splitlines() or [""])[-1]
