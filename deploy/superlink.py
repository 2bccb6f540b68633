"""Flower's SuperLink on two ports: one for the operator, and one for sites.

Flower serves its three APIs on one port. The Fleet API asks sites for their keys; the Control and
the Runtime API ask for nothing, so that whoever reaches them can register keys and start runs, that
is, run code on the server and at all sites. Here the port that sites reach has the Fleet API alone,
and everything else stays on a port of the machine itself.
"""

import socket
import sys
from collections.abc import Sequence

import uvicorn
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.cli.flower_superlink import (
    SuperLinkLifespan,
    _parse_superlink_lifespan_config,
)
from flwr.superlink.main import create_app
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.problem import DeployError
from deploy.version import VERSION_HEADER, flower_version

__all__ = ["FleetOnly", "listen", "run_superlink"]

_FLEET = "/v1/fleet/"
_HEALTH = "/health"


class FleetOnly:
    """On one port, answer to nothing but the Fleet API and the question after health.

    Parameters
    ----------
    app : ASGIApp
        The whole SuperLink.
    port : int
        The port of the sites. On other ports nothing is held back.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 404."""
        if scope["type"] == "lifespan" or scope["server"][1] != self._port:
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == _HEALTH:
            await self._app(scope, receive, _with_version(send))
        elif scope["type"] == "http" and scope["path"].startswith(_FLEET):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse("Not found", status_code=404)(scope, receive, send)
        else:
            await send({"type": "websocket.close"})


def _with_version(send: Send) -> Send:
    async def send_with_version(message: Message) -> None:
        if message["type"] == "http.response.start":
            header = (VERSION_HEADER.encode(), flower_version().encode())
            message["headers"] = [*message["headers"], header]
        await send(message)

    return send_with_version


def listen(host: str, port: int) -> socket.socket:
    """Listen on a port.

    Raises
    ------
    DeployError
        If that is not possible, for example because another process does.
    """
    try:
        return socket.create_server((host, port), family=_family(host), backlog=2048)
    except OSError as error:
        raise DeployError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def run_superlink(arguments: Sequence[str], sites: socket.socket) -> None:
    """Run the SuperLink until it is told to end.

    Parameters
    ----------
    arguments : Sequence[str]
        Those of `flower-superlink`; its `--host` and `--port` are the operator's.
    sites : socket.socket
        Where sites connect.
    """
    sys.argv = ["flower-superlink", *arguments]
    config = _parse_superlink_lifespan_config()
    operator = listen(config.host, config.port)
    app = create_app(config, SuperLinkLifespan)
    app.add_middleware(FleetOnly, port=sites.getsockname()[1])
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=get_uvicorn_log_config(console_handler.level),
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
        )
    )
    server.run(sockets=[operator, sites])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
