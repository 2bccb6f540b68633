"""Do the runs of an experiment: skip the finished, go on with the cut, keep the failed apart.

Failed runs are moved to `failed/` in the experiment's folder, with the SuperLink's log of their
time, and are tried again the next time.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from isoloco_flwr.pretraining.states import states_folder
from server_app.results import write_json
from simulations.experiment import ROOT, Run, Scale
from simulations.flower import SuperLink, flwr_run, local_superlink
from simulations.guard import guarded
from simulations.runs import (
    Resources,
    Runs,
    SweepError,
    describe,
    flwr_arguments,
    last_row,
    shares,
)

__all__ = ["Event", "sweep"]

_POLL_SECONDS = 0.3
_LOCK_SECONDS = 90.0
"""How long the processes of a sweep that was killed may take to end."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a run."""

    what: str
    """"started", "round", "finished" or "failed"."""
    run: Run
    """The run."""
    row: Mapping[str, Any] | None = None
    """Its newest line of metrics."""


@dataclass
class _Active:
    run: Run
    folder: Path
    stack: ExitStack
    process: "subprocess.Popen[str]"
    superlink_log: tuple[Path, int] | None
    rounds_seen: int = -1


def sweep(
    runs: Runs,
    scale: Scale,
    resources: Resources,
    *,
    chosen: Callable[[Run], bool] = lambda run: True,
    report: Callable[[Event], None] = lambda event: None,
) -> list[Run]:
    """Do all chosen runs of an experiment, the tuning first.

    Parameters
    ----------
    runs : Runs
        The experiment's runs that are there.
    scale : Scale
        What is run.
    resources : Resources
        What it may take of the machine.
    chosen : Callable[[Run], bool]
        Which of the runs are done.
    report : Callable[[Event], None]
        Told of everything that happens.

    Returns
    -------
    list[Run]
        The runs that failed.

    Raises
    ------
    SweepError
        If another sweep is at work in the folder, a run there was decided by something else, or
        the SuperLink ends.
    """
    folder = runs.folder
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[Run] = []
    with _lock(folder / ".lock") as lock, ExitStack() as stack:
        for run in runs.plan(scale)[0]:
            if runs.is_finished_here(run):
                _clean_up(folder / run.name)  # where the sweep was killed in between
        superlink: SuperLink | None = None
        for _stage in ("tuning", "final"):
            tried = {run.name for run in failed}
            todo = [
                run
                for run in runs.plan(scale)[0]
                if chosen(run) and run.name not in tried and not runs.is_finished(run)
            ]
            if superlink is None and not all(run.data_parallel for run in todo):
                superlink = stack.enter_context(
                    local_superlink(folder / "flwr", resources.threads, [lock.fileno()])
                )
            failed += _do(todo, folder, resources, superlink, lock, report)
    shutil.rmtree(folder / "flwr", ignore_errors=True)
    return failed


def _do(
    runs: Sequence[Run],
    folder: Path,
    resources: Resources,
    superlink: SuperLink | None,
    lock: IO[str],
    report: Callable[[Event], None],
) -> list[Run]:
    """Do runs, so many at a time; return those that failed."""
    waiting = list(zip(runs, shares(resources, len(runs)), strict=True))
    active: list[_Active] = []
    failed: list[Run] = []
    with ExitStack() as all_runs:
        while waiting or active:
            while waiting and len(active) < resources.jobs:
                run, share = waiting.pop(0)
                stack = all_runs.enter_context(ExitStack())
                active.append(_start(run, folder, resources, share, superlink, lock, stack))
                report(Event(what="started", run=run, row=last_row(folder / run.name)))
            time.sleep(_POLL_SECONDS)
            for one in list(active):
                is_over = one.process.poll() is not None
                row = last_row(one.folder)
                if row and row["round"] != one.rounds_seen:
                    one.rounds_seen = row["round"]
                    report(Event(what="round", run=one.run, row=row))
                if not is_over:
                    continue
                if superlink and superlink.guard.poll() is not None:
                    raise SweepError(f"the SuperLink has ended; its log is {superlink.log_file}")
                one.stack.close()
                active.remove(one)
                if row and row["round"] == one.run.rounds and (one.folder / "model").is_dir():
                    _finish(one.folder)
                    report(Event(what="finished", run=one.run, row=row))
                else:
                    _set_apart(one, folder)
                    failed.append(one.run)
                    report(Event(what="failed", run=one.run, row=row))
    return failed


def _start(
    run: Run,
    folder: Path,
    resources: Resources,
    share: Resources,
    superlink: SuperLink | None,
    lock: IO[str],
    stack: ExitStack,
) -> _Active:
    """Start a run, or go on with it: the app itself looks for a checkpoint."""
    own = folder / run.name
    own.mkdir(exist_ok=True)
    # Not its share, which depends on how many runs were left when the sweep was started.
    write_json(own / "run.json", describe(run, folder, resources))
    log_file = own / "flwr.log"
    superlink_log = None
    if run.data_parallel:
        process = stack.enter_context(_data_parallel(own, resources.threads, log_file, lock))
    else:
        assert superlink is not None
        superlink_log = (superlink.log_file, superlink.log_file.stat().st_size)
        process = stack.enter_context(
            flwr_run(
                superlink,
                ROOT,
                log_file=log_file,
                keep_open=[lock.fileno()],
                **flwr_arguments(run, folder, share),
            )
        )
    return _Active(run, own, stack, process, superlink_log)


@contextmanager
def _data_parallel(
    own: Path, threads: int, log_file: Path, lock: IO[str]
) -> "Iterator[subprocess.Popen[str]]":
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "simulations.data_parallel", str(own)]
    with (
        log_file.open("a") as log,
        guarded(
            command,
            environment=environment,
            folder=ROOT,
            log=log,
            keep_open=[lock.fileno()],
        ) as guard,
    ):
        yield guard


def _finish(own: Path) -> None:
    rows = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    sums = {key: sum(row[key] for row in rows) for key in ("seconds", "bytes-up", "bytes-down")}
    last = {key: rows[-1][key] for key in ("round", "eval-loss", "tokens")}
    # From here on the run is over, whatever happens.
    write_json(own / "finished.json", {**last, **sums})
    _clean_up(own)


def _clean_up(own: Path) -> None:
    """Remove what only a run that goes on needs."""
    shutil.rmtree(own / "checkpoints", ignore_errors=True)
    _forget_workers(own)


def _forget_workers(own: Path) -> None:
    config = own / "config.json"
    if config.exists():
        key = json.loads(config.read_text())["run-key"]
        shutil.rmtree(states_folder() / key, ignore_errors=True)


def _set_apart(one: _Active, folder: Path) -> None:
    """Move a failed run away, with what the SuperLink printed meanwhile."""
    if one.superlink_log:
        path, start = one.superlink_log
        with path.open("rb") as log:
            log.seek(start)
            (one.folder / "superlink.log").write_bytes(log.read())
    _forget_workers(one.folder)
    apart = folder / "failed" / one.run.name
    shutil.rmtree(apart, ignore_errors=True)
    apart.parent.mkdir(exist_ok=True)
    one.folder.rename(apart)


@contextmanager
def _lock(path: Path) -> Iterator[IO[str]]:
    """Hold a folder, once all processes of a sweep that was killed there have ended."""
    with path.open("w") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise SweepError(f"another sweep is at work in {path.parent}") from error
                time.sleep(0.2)
        yield file
