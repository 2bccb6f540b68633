"""The server of a run across sites: Flower's SuperLink, and the operator's `flwr` commands."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from deploy.problem import DeployError
from deploy.superlink import listen, run_superlink

__all__ = ["CONNECTION", "Server", "flower_environment", "flower_home", "register", "start_server"]

CONNECTION = "isoloco"
"""What the operator's `flwr` commands call the server."""


@dataclass(frozen=True)
class Server:
    """Where a server listens and keeps what it knows."""

    keys: Path
    """Folder with `ca.pem`, `server.pem` and `server.key`."""
    state: Path
    """Folder for the database, Flower's own files and what runs write to relative paths."""
    host: str = "0.0.0.0"
    """Address that sites connect to."""
    port: int = 9092
    """Port that sites connect to."""
    operator_port: int = 9093
    """Port of this machine alone, for `flwr` commands."""


def start_server(server: Server) -> None:
    """Run the SuperLink with TLS, node keys and a database, until it is told to end.

    Raises
    ------
    DeployError
        If a certificate is missing or a port is taken.
    """
    os.umask(0o077)  # the database holds models
    keys, state = server.keys.absolute(), server.state.absolute()
    for name in ("ca.pem", "server.pem", "server.key"):
        if not (keys / name).is_file():
            raise DeployError(f"{keys / name} is missing: `certificates` makes it")
    write_connection(server)
    sites = listen(server.host, server.port)
    os.environ.update(flower_environment(state))
    os.chdir(state)  # where ServerApps run
    run_superlink(
        [
            f"--ssl-ca-certfile={keys / 'ca.pem'}",
            f"--ssl-certfile={keys / 'server.pem'}",
            f"--ssl-keyfile={keys / 'server.key'}",
            "--enable-supernode-auth",
            f"--database={state / 'superlink.db'}",
            "--host=127.0.0.1",
            f"--port={server.operator_port}",
            # This environment has what the app needs; another for every run takes gigabytes.
            "--disable-runtime-dependency-installation",
        ],
        sites,
    )


def register(public_key: Path, state: Path) -> None:
    """Let a site in, by its public key; its name is the file's.

    Raises
    ------
    DeployError
        If Flower refuses; the message is Flower's.
    """
    command = ["flwr", "supernode", "register", str(public_key.absolute()), CONNECTION]
    done = subprocess.run(
        [*command, "--name", public_key.stem],
        env={**os.environ, **flower_environment(state.absolute())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        lines = [line.strip(" │\n") for line in done.stdout.splitlines()]
        text = " ".join(line for line in lines if line and not line.startswith(("╭", "╰")))
        raise DeployError(f"{public_key.name} is not registered: {text}")


def write_connection(server: Server) -> None:
    """Write where the operator's `flwr` commands find the server."""
    home = flower_home(server.state.absolute())
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    connection = {
        "address": f"127.0.0.1:{server.operator_port}",
        "root-certificates": str(server.keys.absolute() / "ca.pem"),
    }
    content = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    (home / "config.toml").write_text(tomli_w.dumps(content))


def flower_home(state: Path) -> Path:
    """Return the folder of Flower's own files."""
    return state / "flwr"


def flower_environment(state: Path, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what Flower's programs need: one another, and a folder for all they keep."""
    programs = str(Path(sys.executable).parent)
    quiet = {
        name: outer.get(name, value)
        for name, value in (("FLWR_TELEMETRY_ENABLED", "0"), ("FLWR_DISABLE_UPDATE_CHECK", "1"))
    }
    return {
        **quiet,
        "FLWR_HOME": str(flower_home(state)),
        "ISOLOCO_CACHE": str(state),
        "PATH": f"{programs}{os.pathsep}{outer.get('PATH', '')}",
        "TOKENIZERS_PARALLELISM": "false",
    }
