"""Start `flwr run` simulations on a SuperLink of one's own, and end what was started."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from simulations.guard import guarded

__all__ = ["SuperLink", "flwr_command", "flwr_run", "local_superlink", "run_config_text"]

_START_SECONDS = 60.0


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink in simulation mode that belongs to this process."""

    environment: Mapping[str, str]
    """Environment in which the `flwr` command finds it."""
    log_file: Path
    """Everything the SuperLink, its ServerApps and its ClientApps print."""
    guard: "subprocess.Popen[str]"
    """The process that ends with the SuperLink."""


@contextmanager
def local_superlink(
    flwr_home: Path, threads: int = 1, keep_open: Sequence[int] = ()
) -> Iterator[SuperLink]:
    """Run a SuperLink on free ports with a FLWR_HOME of its own; end it and all it has started.

    All of it ends as well when this process is killed.

    Parameters
    ----------
    flwr_home : Path
        Folder for Flower's own files, made if missing.
    threads : int
        Threads that the arithmetic of ServerApp and every client may use.
    keep_open : Sequence[int]
        File descriptors that stay open until all of it has ended, see `guarded`.

    Raises
    ------
    RuntimeError
        If the SuperLink does not come up; the message shows the end of its log.
    """
    flwr_home.mkdir(parents=True, exist_ok=True)
    http_port, control_port = _free_ports(2)
    environment = {
        **os.environ,
        "FLWR_HOME": str(flwr_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # This environment already holds what the app needs; Flower would build another for every
        # run, with gigabytes of torch in it.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http_port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control_port),
        "OMP_NUM_THREADS": str(threads),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    log_file = flwr_home / "superlink.log"
    command = [
        "flower-superlink",
        "--insecure",
        "--simulation",
        "--isolation=subprocess",
        f"--control-api-address=127.0.0.1:{control_port}",
        "--host=127.0.0.1",
        f"--port={http_port}",
    ]
    with (
        log_file.open("ab") as log,
        guarded(
            command, environment=environment, folder=flwr_home, log=log, keep_open=keep_open
        ) as guard,
    ):
        _wait_until_healthy(guard, http_port, log_file)
        yield SuperLink(environment=environment, log_file=log_file, guard=guard)


@contextmanager
def flwr_run(
    superlink: SuperLink,
    app: Path,
    *,
    num_supernodes: int,
    run_config: Mapping[str, bool | float | int | str],
    cpus_per_client: int = 1,
    gpus_per_client: float = 0.0,
    log_file: Path | None = None,
    keep_open: Sequence[int] = (),
) -> "Iterator[subprocess.Popen[str]]":
    """Run `flwr run --stream`; the output of its process is the run's log.

    Parameters
    ----------
    superlink : SuperLink
        Where to run.
    app, num_supernodes, run_config, cpus_per_client, gpus_per_client
        See `flwr_command`.
    log_file : Path, optional
        File that the log is appended to; without one it is the process's `stdout`.
    keep_open : Sequence[int]
        See `guarded`.
    """
    command = flwr_command(
        app,
        num_supernodes=num_supernodes,
        run_config=run_config,
        cpus_per_client=cpus_per_client,
        gpus_per_client=gpus_per_client,
    )
    with ExitStack() as stack:
        log = stack.enter_context(log_file.open("a")) if log_file else subprocess.PIPE
        yield stack.enter_context(
            guarded(
                command,
                environment=superlink.environment,
                folder=Path.cwd(),
                log=log,
                keep_open=keep_open,
            )
        )


def flwr_command(
    app: Path,
    *,
    num_supernodes: int,
    run_config: Mapping[str, bool | float | int | str],
    cpus_per_client: int = 1,
    gpus_per_client: float = 0.0,
) -> list[str]:
    """Return the `flwr run` of a simulation.

    Parameters
    ----------
    app : Path
        Folder of the Flower app.
    num_supernodes : int
        Virtual clients.
    run_config : Mapping[str, bool | float | int | str]
        What differs from the app's own config.
    cpus_per_client : int
        CPUs a client takes up: a client runs when so many are free.
    gpus_per_client : float
        GPUs, or a share of one, that a client takes up.
    """
    federation = (
        f"num-supernodes={num_supernodes} client-resources-num-cpus={cpus_per_client} "
        f"client-resources-num-gpus={gpus_per_client}"
    )
    command = ["flwr", "run", str(app), "--stream", "--federation-config", federation]
    if run_config:
        command += ["--run-config", run_config_text(run_config)]
    return command


def run_config_text(run_config: Mapping[str, bool | float | int | str]) -> str:
    """Return a run config as `flwr run --run-config` takes it."""
    return " ".join(f"{key}={_toml(value)}" for key, value in run_config.items())


def _toml(value: bool | float | int | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _wait_until_healthy(guard: "subprocess.Popen[str]", port: int, log_file: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while guard.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-10:])
    raise RuntimeError(f"the SuperLink did not start within {_START_SECONDS:g} s:\n{tail}")
