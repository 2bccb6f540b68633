"""Do the runs of an experiment: skip the finished, go on with the cut, keep the failed apart.

In the experiment's folder each run has one of its own, by its id, with `run.json` (everything that
decided it), the files of the app (`metrics.jsonl`, `config.json`, `model/`, ...), `flwr.log`, and
once it is over `finished.json`. Failed runs are moved to `failed/`, with the SuperLink's log of
their time, and are tried again the next time.
"""

import fcntl
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from isoloco_flwr.checkpoint import ChangedSettingsError, check_same_settings
from isoloco_flwr.pretraining.states import states_folder
from server_app.results import write_json
from simulations.experiment import (
    ROOT,
    Experiment,
    Run,
    Scale,
    final_runs,
    tuning_runs,
)
from simulations.flower import SuperLink, flwr_command, flwr_run, local_superlink
from simulations.guard import guarded

__all__ = [
    "Event",
    "Resources",
    "SweepError",
    "describe",
    "expected_seconds",
    "experiment_folder",
    "finished",
    "is_finished",
    "last_row",
    "plan",
    "sweep",
]

START_SECONDS = 20.0
"""What a run takes besides its rounds: Flower and Ray start and end."""

_POLL_SECONDS = 0.3
_LOCK_SECONDS = 40.0
"""How long the processes of a sweep that was killed may take to end."""


class SweepError(RuntimeError):
    """A sweep that cannot go on; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the runs may take of the machine."""

    jobs: int
    """Runs at a time."""
    cpus_per_client: int
    """CPUs a virtual client takes up."""
    gpus_per_client: float
    """GPUs, or a share of one, that a virtual client takes up."""
    threads: int
    """Threads of a client's arithmetic, and of a data-parallel run's."""


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


def experiment_folder(runs_root: Path, experiment: Experiment, scale_name: str) -> Path:
    """Return where an experiment's runs lie: by its name, and the scale's if not `laptop`."""
    suffix = "" if scale_name == "laptop" else f"-{scale_name}"
    return runs_root / f"{experiment.name}{suffix}"


def plan(folder: Path, scale: Scale) -> tuple[list[Run], list[str]]:
    """Return all runs that are known by now, and the tuning runs that others still wait for."""
    tuning = tuning_runs(scale)
    losses = {run.name: final_loss(folder / run.name) for run in tuning if is_finished(folder, run)}
    final, untuned = final_runs(scale, losses)
    return list({run.name: run for run in [*tuning, *final]}.values()), untuned


def describe(run: Run, folder: Path, resources: Resources) -> dict[str, Any]:
    """Return the content of a run's run.json."""
    return {
        "run": run.name,
        "point": dict(run.point),
        "tuned": dict(run.grid),
        "workers": run.workers,
        "data-parallel": run.data_parallel,
        "run-config": dict(run.config),
        "command": _command(run, folder, resources),
    }


def is_finished(folder: Path, run: Run) -> bool:
    """Tell whether a run is over.

    Raises
    ------
    SweepError
        If the run that is there was decided by something else.
    """
    try:
        saved = json.loads((folder / run.name / "run.json").read_text())
    except FileNotFoundError:
        return False
    try:
        check_same_settings(_deciding(saved), _deciding(describe(run, folder, _ANY)))
    except ChangedSettingsError as error:
        raise SweepError(
            f"{folder / run.name}: {error}; move that folder away, or rename the option"
        ) from error
    return (folder / run.name / "finished.json").exists()


def finished(folder: Path) -> dict[str, Any]:
    """Return what finished.json of a run's folder says."""
    content: dict[str, Any] = json.loads((folder / "finished.json").read_text())
    return content


def final_loss(folder: Path) -> float:
    """Return the held-out loss at the end of a finished run."""
    return float(finished(folder)["eval-loss"])


def last_row(folder: Path) -> dict[str, Any] | None:
    """Return the newest whole line of a run's metrics."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    whole = [line for line in lines if line.endswith("\n")]
    return json.loads(whole[-1]) if whole else None


def expected_seconds(folder: Path, runs: Sequence[Run], resources: Resources) -> float | None:
    """Return how long the unfinished runs should take, None as long as no run has finished.

    A run is taken to need as long as the median of those with as many workers, or of all where
    there is none, in proportion to the rounds it still has to do.
    """
    times: dict[int, list[float]] = {}
    for run in runs:
        if is_finished(folder, run):
            seconds = float(finished(folder / run.name)["seconds"])
            times.setdefault(run.workers, []).append(seconds)
    if not times:
        return None
    every = [seconds for group in times.values() for seconds in group]
    total = 0.0
    for run in runs:
        if not is_finished(folder, run):
            row = last_row(folder / run.name)
            left = 1 - (row["round"] if row else 0) / run.rounds
            typical = statistics.median(times.get(run.workers, every))
            total += typical * left + START_SECONDS
    return total / resources.jobs


def sweep(
    folder: Path,
    scale: Scale,
    resources: Resources,
    *,
    chosen: Callable[[Run], bool] = lambda run: True,
    report: Callable[[Event], None] = lambda event: None,
) -> list[Run]:
    """Do all chosen runs of an experiment, the tuning first.

    Parameters
    ----------
    folder : Path
        The experiment's folder.
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
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[Run] = []
    with _lock(folder / ".lock") as lock, ExitStack() as stack:
        for run in plan(folder, scale)[0]:
            if is_finished(folder, run):
                _clean_up(folder / run.name)  # where the sweep was killed in between
        superlink: SuperLink | None = None
        for _stage in ("tuning", "final"):
            tried = {run.name for run in failed}
            todo = [
                run
                for run in plan(folder, scale)[0]
                if chosen(run) and run.name not in tried and not is_finished(folder, run)
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
    waiting = list(runs)
    active: list[_Active] = []
    failed: list[Run] = []
    with ExitStack() as all_runs:
        while waiting or active:
            while waiting and len(active) < resources.jobs:
                run = waiting.pop(0)
                stack = all_runs.enter_context(ExitStack())
                active.append(_start(run, folder, resources, superlink, lock, stack))
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
    superlink: SuperLink | None,
    lock: IO[str],
    stack: ExitStack,
) -> _Active:
    """Start a run, or go on with it: the app itself looks for a checkpoint."""
    own = folder / run.name
    own.mkdir(exist_ok=True)
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
                **_flwr_arguments(run, folder, resources),
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


def _flwr_arguments(run: Run, folder: Path, resources: Resources) -> dict[str, Any]:
    places = {"output-dir": str(folder / run.name), "resume": True}
    return {
        "num_supernodes": run.workers,
        "run_config": {**run.config, **places},
        "cpus_per_client": resources.cpus_per_client,
        "gpus_per_client": resources.gpus_per_client,
    }


def _command(run: Run, folder: Path, resources: Resources) -> str:
    """Return the line that does a run by itself, typed into a shell in the project's folder."""
    own = f"runs/{folder.name}/{run.name}"
    if run.data_parallel:
        return f"python -m simulations.data_parallel {own}"
    arguments = _flwr_arguments(run, folder, resources)
    arguments["run_config"] |= {"output-dir": f"{_HERE}/{own}", "resume": False}
    # The run config is in single quotes, which keep the shell from seeing variables.
    return shlex.join(flwr_command(Path(), **arguments)).replace(_HERE, "'\"$PWD\"'")


_HERE = "@here@"
_ANY = Resources(jobs=1, cpus_per_client=1, gpus_per_client=0.0, threads=1)


def _deciding(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of run.json changes a run's numbers, flat."""
    kept = {key: content[key] for key in ("workers", "data-parallel")}
    return {**kept, **content["run-config"]}


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
