"""What the port of the sites lets through."""

import asyncio
import socket

import pytest

from deploy.problem import DeployError
from deploy.superlink import FleetOnly, listen
from deploy.version import VERSION_HEADER, flower_version

SITES_PORT, OPERATORS_PORT = 9092, 9093


def ask(path: str, *, port: int = SITES_PORT, kind: str = "http") -> list[dict]:
    """Send a request through, and return what comes back."""
    sent = []

    async def superlink(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"the SuperLink"})

    async def send(message) -> None:
        sent.append(message)

    async def receive() -> dict:
        return {"type": "http.request"}

    scope = {"type": kind, "path": path, "server": ("10.0.0.1", port), "headers": []}
    asyncio.run(FleetOnly(superlink, SITES_PORT)(scope, receive, send))
    return sent


@pytest.mark.parametrize("path", ["/v1/fleet/pull-messages", "/v1/fleet/push-object", "/health"])
def test_sites_reach_what_they_need(path):
    assert ask(path)[1]["body"] == b"the SuperLink"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet",
        "/v1/fleetfoot",
        "//v1/control/start-run",
        "/V1/CONTROL/start-run",
        "/docs",
        "/openapi.json",
        "/health/",
        "/",
        "",
    ],
)
def test_sites_reach_nothing_else(path):
    start, body = ask(path)
    assert start["status"] == 404
    assert body["body"] == b"Not found"


def test_the_operator_reaches_everything():
    assert ask("/v1/control/start-run", port=OPERATORS_PORT)[1]["body"] == b"the SuperLink"


def test_sites_open_no_websockets():
    assert ask("/v1/fleet/anything", kind="websocket") == [{"type": "websocket.close"}]


def test_the_answer_after_health_says_flowers_version():
    headers = dict(ask("/health")[0]["headers"])
    assert headers == {VERSION_HEADER.encode(): flower_version().encode()}


def test_a_port_that_is_taken_is_one_line():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(DeployError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already"),
    ):
        listen("127.0.0.1", taken.getsockname()[1])
