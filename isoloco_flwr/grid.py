"""A Grid that hands replies on as they arrive, with Flower's own types."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging import WARNING

import httpx
from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.supercore.run import Run

__all__ = ["StreamingGrid", "WrappedGrid", "forgiven"]

_SHORTEST_WAIT = 0.05
_LONGEST_WAIT = 1.0
_ASKING_SHARE = 0.05
"""Share of the time that may go into asking for replies that are not there: few are asked for
often, so that the last of a round is not noticed late, and many seldom."""


@contextmanager
def forgiven(what: str) -> Iterator[None]:
    """Go on after what is in here where the SuperLink has a moment of weakness, and say so.

    Its database is locked at times while large models are written to it, and Flower tries again
    only where there is no connection.
    """
    try:
        yield
    except httpx.HTTPStatusError as error:
        if not error.response.is_server_error:
            raise
        log(WARNING, "The SuperLink fails to %s, it is asked again: %s", what, error)


class WrappedGrid(Grid):
    """Hand everything on to another Grid; subclasses change what they are for.

    Parameters
    ----------
    grid : Grid
        The grid that a ServerApp was given.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

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
        """Return the ids of the nodes that are online."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return what is known of the nodes that are online."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages through the wrapped grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch the replies that are there through the wrapped grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies, through the wrapped grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)


class StreamingGrid(WrappedGrid):
    """Wrap a Grid so that `send_and_receive` yields each reply when it comes.

    Flower's own grids gather all replies of a round in memory before a strategy sees the first.
    Here one reply is in flight at a time, in simulations and deployments alike.

    Parameters
    ----------
    grid : Grid
        The grid that a ServerApp was given.
    """

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages at once and return an iterator over the replies as they arrive.

        Parameters
        ----------
        messages : Iterable[Message]
            The messages to send.
        timeout : float, optional
            Seconds after which the iterator ends, whoever is missing; None waits for all. A reply
            that comes later is never fetched.
        """
        message_ids = [message_id for message_id in self.push_messages(messages) if message_id]
        deadline = None if timeout is None else time.monotonic() + timeout
        return self._receive(message_ids, deadline)

    def _pull_one(self, message_id: str) -> list[Message]:
        with forgiven("hand a reply over"):
            return list(self.pull_messages([message_id]))
        return []

    def _receive(self, message_ids: list[str], deadline: float | None) -> Iterator[Message]:
        while message_ids:
            missing = []
            in_vain = 0.0
            for message_id in message_ids:
                asked = time.monotonic()
                # One at a time: a reply is freed before the next is fetched.
                replies = self._pull_one(message_id)
                if not replies:
                    missing.append(message_id)
                    in_vain += time.monotonic() - asked
                while replies:
                    yield replies.pop(0)
            wait = min(max(_SHORTEST_WAIT, in_vain / _ASKING_SHARE), _LONGEST_WAIT)
            message_ids = missing
            if not message_ids:
                return
            if deadline is not None:
                wait = min(wait, deadline - time.monotonic())
                if wait <= 0:
                    return
            time.sleep(wait)
