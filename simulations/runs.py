"""The runs of an experiment that are there: what decided them, which are over, what is left to do.

In the experiment's folder each run has one of its own, by its id, with `run.json` (everything that
decided it), the files of the app (`metrics.jsonl`, `config.json`, `model/`, ...), `flwr.log`, and
once it is over `finished.json`. Results that another machine has brought count as finished too, and
so do runs of another experiment that the same settings have decided.
"""

import json
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isoloco_flwr.checkpoint import ChangedSettingsError, check_same_settings
from isoloco_flwr.presets import PRESETS
from simulations.experiment import ROOT, Experiment, Run, Scale, app_config, final_runs, tuning_runs
from simulations.flower import flwr_command, run_config_text
from simulations.outcome import Outcome, read_outcome, read_results

__all__ = [
    "Resources",
    "Runs",
    "SweepError",
    "brought_results",
    "describe",
    "experiment_folder",
    "flwr_arguments",
    "last_row",
    "outcomes_of_others",
    "shares",
]

START_SECONDS = 20.0
"""What a run takes besides its rounds: Flower and Ray start and end."""

_HERE = "@here@"
_RESULTS = ROOT / "simulations" / "results"


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


def shares(resources: Resources, count: int) -> list[Resources]:
    """Return what each of so many runs may take, in the order in which they start.

    One that is left over for the end has the CPUs of the others, too: its clients take up fewer,
    so that more of them run at a time.
    """
    if resources.jobs == 1 or count % resources.jobs != 1:
        return [resources] * count
    least = min(resources.cpus_per_client, resources.threads)
    cpus = max(least, resources.cpus_per_client // resources.jobs)
    return [resources] * (count - 1) + [replace(resources, cpus_per_client=cpus)]


def experiment_folder(runs_root: Path, experiment: Experiment, scale_name: str) -> Path:
    """Return where an experiment's runs lie: by its name, and the scale's if not `laptop`."""
    suffix = "" if scale_name == "laptop" else f"-{scale_name}"
    return runs_root / f"{experiment.name}{suffix}"


def brought_results(folder: Path) -> Path:
    """Return where results lie that came with the project, for an experiment's folder."""
    return _RESULTS / folder.name / "results.jsonl"


def outcomes_of_others(folder: Path) -> list[Outcome]:
    """Return what other experiments have finished: beside a folder, and brought with the project.

    Raises
    ------
    SweepError
        If results cannot be read.
    """
    brought = [
        outcome
        for path in sorted(_RESULTS.glob("*/results.jsonl"))
        if path != brought_results(folder)
        for outcome in _read_results(path)
    ]
    beside = [
        _read_outcome(path.parent)
        for path in sorted(folder.parent.glob("*/*/finished.json"))
        if path.parents[1] != folder
    ]
    return brought + beside


def _read_outcome(folder: Path) -> Outcome:
    try:
        return read_outcome(folder)
    except (OSError, ValueError, KeyError) as error:
        raise _broken(folder, error) from error


def _broken(folder: Path, error: Exception) -> SweepError:
    return SweepError(f"{folder}: allowed is what a run leaves ({error!r}); move that folder away")


def _read_results(path: Path) -> list[Outcome]:
    try:
        return read_results(path)
    except (ValueError, TypeError) as error:
        raise SweepError(f"{path}: allowed is what a report writes ({error})") from error


class Runs:
    """The runs of an experiment that are there.

    Parameters
    ----------
    folder : Path
        The experiment's folder, which need not exist.
    results : Path, optional
        A `results.jsonl`, which need not exist either: runs in it count as finished where the same
        settings have decided them.
    others : Iterable[Outcome]
        Runs of other experiments; they count in the same way, whatever they are called there.

    Raises
    ------
    SweepError
        If the results cannot be read.
    """

    def __init__(
        self, folder: Path, results: Path | None = None, others: Iterable[Outcome] = ()
    ) -> None:
        self.folder = folder
        own = _read_results(results) if results and results.exists() else []
        self._brought_names = {outcome.run for outcome in own}
        self._brought = {
            _key(_deciding(outcome.workers, outcome.data_parallel, outcome.run_config)): outcome
            for outcome in [*others, *own]
        }

    def plan(self, scale: Scale) -> tuple[list[Run], list[str]]:
        """Return all runs known by now, and the tuning runs that others still wait for."""
        tuning = tuning_runs(scale)
        losses = {run.name: self.outcome(run).loss for run in tuning if self.is_finished(run)}
        final, untuned = final_runs(scale, losses)
        return list({run.name: run for run in [*tuning, *final]}.values()), untuned

    def is_finished(self, run: Run) -> bool:
        """Tell whether a run is over, here or elsewhere.

        Raises
        ------
        SweepError
            If the run that is in the folder was decided by something else, or cannot be read.
        """
        return self.is_finished_here(run) or self.is_brought(run)

    def is_finished_here(self, run: Run) -> bool:
        """Tell whether a run is over in the folder; see `is_finished`."""
        own = self.folder / run.name
        try:
            saved = json.loads((own / "run.json").read_text())
            there = _deciding(saved["workers"], saved["data-parallel"], saved["run-config"])
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError) as error:
            raise _broken(own, error) from error
        try:
            check_same_settings(there, _decided_by(run))
        except ChangedSettingsError as error:
            raise SweepError(f"{own}: {error}; move that folder away, or rename the option") from (
                error
            )
        return (own / "finished.json").exists()

    def is_brought(self, run: Run) -> bool:
        """Tell whether there is a result of a run from elsewhere, decided by the same settings."""
        return _key(_decided_by(run)) in self._brought

    def is_brought_otherwise(self, run: Run) -> bool:
        """Tell whether there is a result of a run from elsewhere that other settings decided."""
        return run.name in self._brought_names and not self.is_brought(run)

    def outcome(self, run: Run) -> Outcome:
        """Return what a finished run has left; its own folder comes first."""
        if self.is_finished_here(run):
            return _read_outcome(self.folder / run.name)
        brought = self._brought[_key(_decided_by(run))]
        return replace(brought, run=run.name, point=dict(run.point), tuned=dict(run.grid))

    def expected_seconds(self, runs: Sequence[Run], jobs: int) -> float | None:
        """Return how long the unfinished runs should take, None as long as no run has finished.

        A run is taken to need as long as the median of those with as many workers, or of all where
        there is none, in proportion to the rounds it still has to do. Only the folder's own count:
        other machines are faster or slower.

        Parameters
        ----------
        runs : Sequence[Run]
            All runs.
        jobs : int
            Runs at a time.
        """
        times: dict[int, list[float]] = {}
        for run in runs:
            if self.is_finished_here(run):
                end = json.loads((self.folder / run.name / "finished.json").read_text())
                times.setdefault(run.workers, []).append(float(end["seconds"]))
        if not times:
            return None
        every = [seconds for group in times.values() for seconds in group]
        total = 0.0
        for run in runs:
            if not self.is_finished(run):
                row = last_row(self.folder / run.name)
                left = 1 - (row["round"] if row else 0) / run.rounds
                typical = statistics.median(times.get(run.workers, every))
                total += typical * left + START_SECONDS
        return total / jobs


def last_row(folder: Path) -> dict[str, Any] | None:
    """Return the newest whole line of a run's metrics."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    whole = [line for line in lines if line.endswith("\n")]
    return json.loads(whole[-1]) if whole else None


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


def flwr_arguments(run: Run, folder: Path, resources: Resources) -> dict[str, Any]:
    """Return what `flwr_command` takes for a run."""
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
        config = shlex.quote(run_config_text(run.config))
        return f"python -m simulations.data_parallel {own} {config}"
    arguments = flwr_arguments(run, folder, resources)
    arguments["run_config"] |= {"output-dir": f"{_HERE}/{own}", "resume": False}
    # The run config is in single quotes, which keep the shell from seeing variables.
    return shlex.join(flwr_command(Path(), **arguments)).replace(_HERE, "'\"$PWD\"'")


def _decided_by(run: Run) -> dict[str, Any]:
    return _deciding(run.workers, run.data_parallel, run.config)


def _deciding(workers: int, data_parallel: bool, run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changes a run's numbers, flat and with the app's defaults."""
    config = {
        key: value
        for key, value in {**app_config(), **run_config}.items()
        if key != "strategy.diagnostics"
        and not key.startswith("checkpoint.")
        and not (data_parallel and key.startswith("strategy."))
    }
    if config.get("strategy.outer-lr") == "preset":
        config["strategy.outer-lr"] = PRESETS[config["strategy.name"]].outer_lr
    return {"workers": workers, "data-parallel": data_parallel, **config}


def _key(deciding: Mapping[str, Any]) -> str:
    return json.dumps(deciding, sort_keys=True)
