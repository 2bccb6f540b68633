"""Run a command, and end it with all it has started once its owner is gone.

`python guard.py FD COMMAND ...` runs the command and waits: for the command, or for the end of the
pipe FD, which comes when the owner closes its side or dies, by kill -9 too. Flower and Ray start
processes in sessions of their own, which outlive their parents for a while or for ever; they are
found by a mark in their environment (where there is a /proc) and, where they have written over it
as Ray's agents do, by who has started them.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = ["guarded"]

_Process = tuple[int, str]
"""Number and time of its start: the number alone may become another's."""

_MARK = "ISOLOCO_GUARD"
_PATIENCE = 10.0
"""Seconds between asking and insisting."""
_LONGEST_END = 60.0
"""Seconds that a killed process may take to go: on a busy machine it waits for its turn."""


@contextmanager
def guarded(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    log: IO[Any] | int,
    keep_open: Sequence[int] = (),
) -> "Iterator[subprocess.Popen[str]]":
    """Run a command under a guard; at the end of the block nothing of it runs any more.

    Parameters
    ----------
    command : Sequence[str]
        The command and its arguments.
    environment : Mapping[str, str]
        Its whole environment.
    folder : Path
        Its working directory.
    log : file object or subprocess.PIPE
        Where its standard output and errors go.
    keep_open : Sequence[int]
        File descriptors, as of a lock, that the guard holds as long as anything of the command may
        still run.

    Yields
    ------
    subprocess.Popen
        The guard, which ends with the command and has its exit code.
    """
    guards_end, owners_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, __file__, str(guards_end), *command],
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        start_new_session=True,  # Ctrl-C is for the owner alone
        pass_fds=[guards_end, *keep_open],
    )
    os.close(guards_end)
    try:
        yield process
    finally:
        os.close(owners_end)
        process.wait()


def _main(pipe: int, command: list[str]) -> int:
    mark = f"{_MARK}={uuid.uuid4().hex}"
    process = subprocess.Popen(
        command,
        env={**os.environ, _MARK: mark.split("=")[1]},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    owner_gone = threading.Event()

    def wait_for_owner() -> None:
        os.read(pipe, 1)
        owner_gone.set()

    threading.Thread(target=wait_for_owner, daemon=True).start()
    while process.poll() is None and not owner_gone.wait(0.05):
        pass
    _end_all(process, mark.encode(), at_once=owner_gone.is_set())
    return process.wait()


def _end_all(process: "subprocess.Popen[bytes]", mark: bytes, *, at_once: bool) -> None:
    """End all processes of the command: at once, or by asking them and insisting after a while.

    At once means that all stop before the first ends. Were a worker to end before the ServerApp it
    answers to, a round would go on without it and into a checkpoint, and the run that is resumed
    would not be the undisturbed one.
    """
    phases = [(signal.SIGKILL, _LONGEST_END)]
    known: set[_Process] = set()
    if at_once:
        known = _stop_all(process.pid, mark)
    else:
        phases.insert(0, (signal.SIGTERM, _PATIENCE))
    group_lives = True
    for signal_number, patience in phases:
        deadline = time.monotonic() + patience
        signalled: set[_Process] = set()
        while time.monotonic() < deadline:
            group_lives = group_lives and _signal_group(process.pid, signal_number)
            known = _belonging(mark, known)
            _signal(known - signalled, signal_number)
            signalled |= known
            # Once it has ended, the group's number may become a stranger's.
            ended = process.poll() is not None
            if ended and not group_lives and not known:
                return
            time.sleep(0.1)


def _stop_all(group: int, mark: bytes) -> set[_Process]:
    """Stop all processes of the command, those too that others start before they stand still."""
    _signal_group(group, signal.SIGSTOP)
    stopped: set[_Process] = set()
    while new := _belonging(mark, stopped) - stopped:
        _signal(new, signal.SIGSTOP)
        stopped |= new
        time.sleep(0.1)
    return stopped


def _signal(processes: set[_Process], signal_number: int) -> None:
    for number, _ in processes:
        with suppress(ProcessLookupError):
            os.kill(number, signal_number)


def _signal_group(group: int, signal_number: int) -> bool:
    """Signal a process group; tell whether there is one of ours."""
    try:
        os.killpg(group, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _belonging(mark: bytes, known: set[_Process]) -> set[_Process]:
    """Return the living processes that have a mark or are known, and all that they have started."""
    found = set()
    children: dict[int, list[_Process]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # What is before the last bracket is the program's name, with any characters.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z":  # has ended, and waits for its parent to take note
                continue
            one = (int(folder.name), fields[19])
            children.setdefault(int(fields[1]), []).append(one)
            if one in known or mark in (folder / "environ").read_bytes().split(b"\0"):
                found.add(one)
    waiting = list(found)
    while waiting:
        number, _ = waiting.pop()
        new = [child for child in children.get(number, []) if child not in found]
        found.update(new)
        waiting += new
    return found


if __name__ == "__main__":
    for passed_over in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Not SIG_IGN, which the command would inherit.
        signal.signal(passed_over, lambda *_: None)
    sys.exit(_main(int(sys.argv[1]), sys.argv[2:]))
