"""The app, with a note of when each message of a round comes and goes.

`benchmarks.timed_run` lays it beside a copy of the app. Times are seconds of the machine's clock,
the same in all processes, one line each in the file OUTPUT-DIR.times.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from clients.client_app import app as own_client_app
from isoloco_flwr.grid import StreamingGrid
from server_app.server_app import app as own_server_app

client_app = ClientApp()
server_app = ServerApp()


def note(context: Context, kind: str, started: float, server_round: object) -> None:
    line = {"kind": kind, "start": started, "end": time.monotonic(), "round": server_round}
    with Path(f"{context.run_config['output-dir']}.times").open("a") as file:
        file.write(json.dumps(line) + "\n")


@client_app.query()
def query(message: Message, context: Context) -> Message:
    return own_client_app(message, context)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    started = time.monotonic()
    reply = own_client_app(message, context)
    note(context, "train", started, message.content.config_records["config"]["server-round"])
    return reply


class TimedGrid(StreamingGrid):
    """Notes when a round's messages are sent and when the newest reply was fetched."""

    def __init__(self, grid: Grid, context: Context) -> None:
        super().__init__(grid)
        self._context = context
        self._round: object = None

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        started = time.monotonic()
        messages = list(messages)
        ids = list(super().push_messages(messages))
        if messages and "config" in messages[0].content:
            self._round = messages[0].content.config_records["config"]["server-round"]
            note(self._context, "send", started, self._round)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        started = time.monotonic()
        replies = list(super().pull_messages(message_ids))
        if replies and self._round is not None:
            note(self._context, "receive", started, self._round)
        return replies


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    own_server_app(TimedGrid(grid, context), context)
