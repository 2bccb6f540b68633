"""A SuperLink and sites as real processes on loopback, and what can happen to them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from simulations.guard import guarded

ROOT = Path(__file__).resolve().parents[1]
MARK = "ISOLOCO_TEST_PROCESS"


class Federation:
    """A SuperLink with a state database, and sites that reach it through a cable each.

    A context manager: at its end nothing of it runs any more.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "flwr-home"
        self.home.mkdir(parents=True)
        self.cache = folder / "cache"
        self.port = free_port()
        (self.home / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.cables: dict[int, Cable] = {}
        self._stack = ExitStack()
        self._serial = 0

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_superlink(self) -> None:
        """Start it, or start it again on the database it had."""
        self._start(
            "superlink",
            [
                *("flower-superlink", "--insecure", f"--database={self.folder / 'state.db'}"),
                *("--host=127.0.0.1", f"--port={self.port}"),
            ],
        )
        wait_for(lambda: is_healthy(self.port), 60, "the SuperLink to start")

    def start_site(self, place: int, places: int, **node: str | float) -> None:
        """Start a site, or start it again."""
        if place not in self.cables:
            self.cables[place] = self._stack.enter_context(Cable(self.port))
        config = {"partition-id": place, "num-partitions": places, **node}
        words = [f"{key}={toml(value)}" for key, value in config.items()]
        self._start(
            f"site-{place}",
            [
                *("flower-supernode", "--insecure", f"--port={free_port()}"),
                f"--superlink=127.0.0.1:{self.cables[place].port}",
                f"--node-config={' '.join(words)}",
            ],
        )

    def run(
        self, run_config: Mapping[str, object], name: str = "run", app: Path = ROOT
    ) -> "subprocess.Popen[str]":
        """Start `flwr run --stream`; its output goes to NAME.log."""
        words = [f"{key}={toml(value)}" for key, value in run_config.items()]
        command = ["flwr", "run", str(app), "here", "--stream", "--run-config", " ".join(words)]
        return self._start(name, command)

    def log(self, name: str) -> str:
        """Return what a process, and all of its name before it, have printed."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def signal(self, name: str, number: signal.Signals, having: str = "") -> int:
        """Send a signal to a process and all that it has started; return to how many.

        Only to those whose command line has `having` in it.
        """
        found = 0
        for pid in processes(f"{MARK}={self.folder}/{name}"):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if having in command and "guard.py" not in command:
                    os.kill(pid, number)
                    found += 1
        return found

    def _start(self, name: str, command: list[str]) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            MARK: f"{self.folder}/{name}",
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "ISOLOCO_CACHE": str(self.cache),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        log = self._stack.enter_context((self.folder / f"{name}.log").open("ab"))
        return self._stack.enter_context(
            guarded(command, environment=environment, folder=self.folder, log=log)
        )


class Cable:
    """A TCP port of loopback that leads to another one, until it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._ends: list[socket.socket] = []
        self._is_cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> "Cable":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Drop all connections, and every new one, until it is mended."""
        self._is_cut = True
        ends, self._ends = self._ends, []
        for end in ends:
            close(end)

    def mend(self) -> None:
        """Let connections through again."""
        self._is_cut = False

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            self._ends += (near, far)
            if self._is_cut:
                close(near)
                close(far)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=forward, args=(one, other), daemon=True).start()


def forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    close(source)
    close(target)


def close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def processes(mark: str) -> list[int]:
    """Return the processes that have a word in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until something holds; fail saying what it was."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)
