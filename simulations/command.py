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
    final_runs,
    load_experiment,
    tuning_runs,
)
from simulations.sweep import (
    Event,
    Resources,
    SweepError,
    expected_seconds,
    experiment_folder,
    is_finished,
    last_row,
    plan,
    sweep,
)

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
console = Console(highlight=False)

Name = Annotated[str, typer.Argument(help="An experiment's name, or the path of its .toml file.")]
ScaleName = Annotated[str, typer.Option("--scale", help="The experiment's size.")]
RunsRoot = Annotated[Path, typer.Option("--runs", help="Folder that holds all experiments' runs.")]


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
    runs: RunsRoot = ROOT / "runs",
) -> None:
    """Do the runs of an experiment; what is finished is skipped, what was cut goes on."""
    # Ended from outside, too, everything that was started is ended with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    experiment, chosen_scale, folder = _open(name, scale, runs)
    resources = Resources(
        jobs=jobs or chosen_scale.jobs,
        cpus_per_client=cpus or chosen_scale.cpus_per_client,
        gpus_per_client=chosen_scale.gpus_per_client if gpus is None else gpus,
        threads=threads or chosen_scale.threads,
    )

    def chosen(run: Run) -> bool:
        return only is None or any(fnmatch.fnmatch(run.name, pattern) for pattern in only)

    try:
        known, untuned = plan(folder, chosen_scale)
        known = [run for run in known if chosen(run)]
        _show_plan(experiment, known, untuned, folder, resources)
        if show:
            return
        with _Watch(known, folder, resources) as watch:
            failed = sweep(folder, chosen_scale, resources, chosen=chosen, report=watch.tell)
    except SweepError as error:
        sys.exit(str(error))
    if failed:
        sys.exit(f"{len(failed)} runs failed; they are in {folder / 'failed'}, with their logs")
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
    results: Annotated[
        Path | None, typer.Option(help="Read a results.jsonl in place of the runs' folders.")
    ] = None,
    runs: RunsRoot = ROOT / "runs",
) -> None:
    """Write one HTML page, its pictures and all results of an experiment."""
    from simulations.outcome import read_outcome, read_results
    from simulations.report import Unfinished, write_report

    experiment, chosen_scale, folder = _open(name, scale, runs)
    try:
        if results:
            outcomes = read_results(results)
            losses = {outcome.run: outcome.loss for outcome in outcomes}
            final, untuned = final_runs(chosen_scale, losses)
            known = {run.name: run for run in [*tuning_runs(chosen_scale), *final]}
        else:
            planned, untuned = plan(folder, chosen_scale)
            known = {run.name: run for run in planned}
            there = [run for run in planned if is_finished(folder, run)]
            outcomes = [read_outcome(folder / run.name) for run in there]
    except SweepError as error:
        sys.exit(str(error))
    done = {outcome.run for outcome in outcomes}
    unfinished = [Unfinished(run, _why_not(folder, run)) for run in known if run not in done]
    if untuned:
        unfinished.append(Unfinished("further runs", "they follow from the tuning above"))
    page = write_report(experiment, scale, outcomes, unfinished, output or folder / "report")
    console.print(f"{page}", soft_wrap=True)


def _why_not(folder: Path, run: str) -> str:
    log = folder / "failed" / run / "flwr.log"
    if log.exists():
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if "rror" in line] or [line for line in lines if line]
        return f"failed: {errors[-1][:300]}" if errors else "failed"
    row = last_row(folder / run)
    return f"cut after round {row['round']}" if row else "not started"


def _open(name: str, scale: str, runs: Path) -> tuple[Experiment, Scale, Path]:
    try:
        experiment = load_experiment(name)
    except ExperimentError as error:
        sys.exit(str(error))
    if scale not in experiment.scales:
        sys.exit(f"--scale {scale}: allowed is one of {', '.join(experiment.scales)}")
    folder = experiment_folder(runs.expanduser().absolute(), experiment, scale)
    return experiment, experiment.scales[scale], folder


def _show_plan(
    experiment: Experiment,
    known: list[Run],
    untuned: list[str],
    folder: Path,
    resources: Resources,
) -> None:
    table = Table(Column("run", overflow="fold"), "workers", "rounds", "state")
    for run in known:
        row = last_row(folder / run.name)
        state = f"cut after round {row['round']}" if row else "to do"
        if is_finished(folder, run):
            state = "finished"
        elif (folder / "failed" / run.name).exists():
            state = "failed, to be tried again"
        workers = "data-parallel" if run.data_parallel else str(run.workers)
        table.add_row(run.name, workers, str(run.rounds), state)
    console.print(f"[bold]{experiment.title}[/]. {experiment.question}")
    console.print(table)
    left = sum(not is_finished(folder, run) for run in known)
    seconds = expected_seconds(folder, known, resources)
    time = "known once the first has finished" if seconds is None else _duration(seconds)
    console.print(f"{left} of {len(known)} runs to do, {resources.jobs} at a time: {time}")
    if untuned:
        console.print("Further runs follow from the tuning.")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes / 60:.1f} h"


class _Watch:
    """Progress bars of the runs that are going, and a line for each that is over."""

    def __init__(self, known: list[Run], folder: Path, resources: Resources) -> None:
        self._known = {run.name: run for run in known}
        self._folder = folder
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
                seconds = expected_seconds(
                    self._folder, list(self._known.values()), self._resources
                )
                left = f"; the others: {_duration(seconds)}" if seconds else ""
                text = f"finished  {run.name}: held-out loss {row['eval-loss']:.4f}{left}"
            else:
                text = f"failed    {run.name}: see {self._folder / 'failed' / run.name}"
            console.print(text, soft_wrap=True)
