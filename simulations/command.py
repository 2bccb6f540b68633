"""The commands `run`, `report` and `list`."""

import fnmatch
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from simulations.experiment import (
    ROOT,
    Experiment,
    ExperimentError,
    Run,
    Scale,
    experiment_names,
    load_experiment,
)
from simulations.runs import (
    Resources,
    Runs,
    SweepError,
    brought_results,
    experiment_folder,
    last_row,
    outcomes_of_others,
)
from simulations.sweep import Event, sweep

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
console = Console(highlight=False)

Name = Annotated[str, typer.Argument(help="An experiment's name, or the path of its .toml file.")]
ScaleName = Annotated[str, typer.Option("--scale", help="The experiment's size.")]
RunsRoot = Annotated[Path, typer.Option("--runs", help="Folder that holds all experiments' runs.")]
Anew = Annotated[
    bool, typer.Option("--anew", help="Do not count results of other places and experiments.")
]


@app.command("list")
def list_experiments() -> None:
    """Show the experiments."""
    table = Table("experiment", "scales", "question")
    for name in experiment_names():
        experiment = load_experiment(name)
        table.add_row(name, ", ".join(experiment.scales), experiment.question)
    console.print(table)


@app.command()
def run(
    name: Name,
    scale: ScaleName = "laptop",
    only: Annotated[
        list[str] | None,
        typer.Option(help="Do only runs whose id matches a pattern, as 'isoloco_*'; repeatable."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Show what would run and how long it should take.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPUs a virtual client takes.")] = None,
    gpus: Annotated[float | None, typer.Option(min=0, help="GPUs a virtual client takes.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a client.")] = None,
    anew: Anew = False,
    root: RunsRoot = ROOT / "runs",
) -> None:
    """Do the runs of an experiment; what is finished is skipped, what was cut goes on."""
    # Ended from outside, too, everything that was started is ended with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    experiment, chosen_scale, runs = _open(name, scale, root, anew)
    resources = Resources(
        jobs=jobs or chosen_scale.jobs,
        cpus_per_client=cpus or chosen_scale.cpus_per_client,
        gpus_per_client=chosen_scale.gpus_per_client if gpus is None else gpus,
        threads=threads or chosen_scale.threads,
    )

    def chosen(run: Run) -> bool:
        return only is None or any(fnmatch.fnmatch(run.name, pattern) for pattern in only)

    try:
        known, untuned = runs.plan(chosen_scale)
        known = [run for run in known if chosen(run)]
        if not known:
            sys.exit(f"--only {' '.join(only or [])}: no run that is known by now has such an id")
        _show_plan(experiment, known, untuned, runs, resources)
        if show:
            return
        with _Watch(known, runs, resources) as watch:
            failed = sweep(runs, chosen_scale, resources, chosen=chosen, report=watch.tell)
    except SweepError as error:
        sys.exit(str(error))
    if failed:
        sys.exit(
            f"{len(failed)} runs failed; they are in {runs.folder / 'failed'}, with their logs"
        )
    console.print(
        f"All runs are finished. The report: python -m simulations report "
        f"{shlex.quote(name)}{'' if scale == 'laptop' else f' --scale {scale}'}",
        soft_wrap=True,
    )


@app.command()
def report(
    name: Name,
    scale: ScaleName = "laptop",
    output: Annotated[
        Path | None, typer.Option(help="Folder for the page; by default in the experiment's.")
    ] = None,
    anew: Anew = False,
    root: RunsRoot = ROOT / "runs",
) -> None:
    """Write one HTML page, its pictures and all results of an experiment."""
    from simulations.report import Unfinished, write_report

    experiment, chosen_scale, runs = _open(name, scale, root, anew)
    try:
        known, untuned = runs.plan(chosen_scale)
        outcomes = [runs.outcome(run) for run in known if runs.is_finished(run)]
        unfinished = [
            Unfinished(run.name, _why_not(runs.folder, run.name))
            for run in known
            if not runs.is_finished(run)
        ]
    except SweepError as error:
        sys.exit(str(error))
    if untuned:
        unfinished.append(Unfinished("further runs", "they follow from the tuning above"))
    page = write_report(experiment, scale, outcomes, unfinished, output or runs.folder / "report")
    console.print(f"{page}", soft_wrap=True)


def _why_not(folder: Path, run: str) -> str:
    log = folder / "failed" / run / "flwr.log"
    if log.exists():
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if "rror" in line] or [line for line in lines if line]
        return f"failed: {errors[-1][:300]}" if errors else "failed"
    row = last_row(folder / run)
    return f"cut after round {row['round']}" if row else "not started"


def _open(name: str, scale: str, root: Path, anew: bool) -> tuple[Experiment, Scale, Runs]:
    try:
        experiment = load_experiment(name)
        if scale not in experiment.scales:
            sys.exit(f"--scale {scale}: allowed is one of {', '.join(experiment.scales)}")
        folder = experiment_folder(root.expanduser().absolute(), experiment, scale)
        runs = (
            Runs(folder)
            if anew
            else Runs(folder, brought_results(folder), outcomes_of_others(folder))
        )
    except (ExperimentError, SweepError) as error:
        sys.exit(str(error))
    return experiment, experiment.scales[scale], runs


def _show_plan(
    experiment: Experiment,
    known: list[Run],
    untuned: list[str],
    runs: Runs,
    resources: Resources,
) -> None:
    table = Table(Column("run", overflow="fold"), "workers", "rounds", "state")
    for run in known:
        workers = "data-parallel" if run.data_parallel else str(run.workers)
        table.add_row(run.name, workers, str(run.rounds), _state(run, runs))
    console.print(f"[bold]{experiment.title}[/]. {experiment.question}")
    console.print(table)
    left = sum(not runs.is_finished(run) for run in known)
    seconds = runs.expected_seconds(known, resources.jobs)
    time = "known once the first has finished" if seconds is None else _duration(seconds)
    todo = f"{left} of {len(known)} runs to do"
    console.print(f"{todo}, {resources.jobs} at a time: {time}" if left else todo)
    if untuned:
        console.print("Further runs follow from the tuning.")


def _state(run: Run, runs: Runs) -> str:
    if runs.is_finished_here(run):
        return "finished"
    if runs.is_brought(run):
        return "finished elsewhere"
    if row := last_row(runs.folder / run.name):
        return f"cut after round {row['round']}"
    if (runs.folder / "failed" / run.name).exists():
        return "failed, to be tried again"
    if runs.is_brought_otherwise(run):
        return "to do: other settings have decided the result in simulations/results"
    return "to do"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes / 60:.1f} h"


class _Watch:
    """Progress bars of the runs that are going, and a line for each that is over."""

    def __init__(self, known: list[Run], runs: Runs, resources: Resources) -> None:
        self._known = {run.name: run for run in known}
        self._runs = runs
        self._resources = resources
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("round {task.completed} of {task.total}, held-out loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> "_Watch":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, event: Event) -> None:
        """Show an event."""
        run, row = event.run, event.row
        self._known[run.name] = run
        if event.what == "started":
            resumed = f", goes on after round {row['round']}" if row else ""
            console.print(f"started   {run.name}{resumed}", soft_wrap=True)
            self._tasks[run.name] = self._progress.add_task(run.name, total=run.rounds, loss="-")
        if row:
            loss = "-" if row["eval-loss"] is None else f"{row['eval-loss']:.4f}"
            self._progress.update(self._tasks[run.name], completed=row["round"], loss=loss)
        if event.what in ("finished", "failed"):
            self._progress.remove_task(self._tasks.pop(run.name))
            if event.what == "finished" and row:
                seconds = self._runs.expected_seconds(
                    list(self._known.values()), self._resources.jobs
                )
                left = f"; the others: {_duration(seconds)}" if seconds else ""
                text = f"finished  {run.name}: held-out loss {row['eval-loss']:.4f}{left}"
            else:
                text = f"failed    {run.name}: see {self._runs.folder / 'failed' / run.name}"
            console.print(text, soft_wrap=True)
