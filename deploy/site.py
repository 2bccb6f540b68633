"""A site of a run across sites: Flower's SuperNode with its own data, state folder and device."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from deploy.server import flower_environment, flower_home

__all__ = ["Site", "node_config", "start_site"]


@dataclass(frozen=True)
class Site:
    """What a site knows of the server and of itself."""

    server: str
    """HOST:PORT of the server."""
    authority: Path
    """The server's `ca.pem`."""
    key: Path
    """The site's own private key."""
    place: int
    """Which site it is, from 0."""
    sites: int
    """Sites there are in all."""
    data: str
    """Its own text, as `data.source` of the run config."""
    state: Path
    """Folder for the optimizer's moments, token files and Flower's own files."""
    device: str = "auto"
    """auto | cpu | cuda | cuda:N"""
    max_batch_size: int = 0
    """Sequences at once that fit on the device; 0: no limit."""
    max_seconds: float = 0.0
    """Seconds of training a round; 0: no limit."""


def node_config(site: Site) -> dict[str, str | int | float]:
    """Return what the app reads of its site."""
    config: dict[str, str | int | float] = {
        "partition-id": site.place,
        "num-partitions": site.sites,
        "data-source": site.data,
        "state-folder": str(site.state.absolute() / "workers"),
    }
    if site.device != "auto":
        config["device"] = site.device
    if site.max_batch_size:
        config["max-batch-size"] = site.max_batch_size
    if site.max_seconds:
        config["max-seconds"] = site.max_seconds
    return config


def start_site(site: Site) -> None:
    """Become a SuperNode: this process runs until it is told to end."""
    os.umask(0o077)  # the state holds what was learnt from the site's data
    state = site.state.absolute()
    environment = flower_environment(state)
    flower_home(state).mkdir(parents=True, exist_ok=True)
    config_file = state / "node-config.toml"
    config_file.write_text(tomli_w.dumps(node_config(site)))
    command = [
        "flower-supernode",
        f"--superlink={site.server}",
        f"--root-certificates={site.authority.absolute()}",
        f"--auth-supernode-private-key={site.key.absolute()}",
        f"--node-config={config_file}",
        # Its ClientApps connect to it here; no other machine can.
        f"--port={_free_port()}",
    ]
    os.environ.update(environment)
    os.chdir(state)
    os.execvp(command[0], command)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
