"""The workers' states that runs have left on this machine.

`python -m isoloco_flwr.pretraining.states list` and `... remove` are its commands. A worker's inner
optimizer keeps its moments in files, see `worker_state`. A run that is over leaves those of its
last rounds, so that it can be resumed with more rounds.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from isoloco_flwr.pretraining.tokens import cache_folder

__all__ = ["RunStates", "app", "list_states", "states_folder"]

app = typer.Typer(help="List and remove what workers remember of runs on this machine.")

_Folder = Annotated[
    Path | None, typer.Option("--folder", help="A site's own state-folder, in place of the usual.")
]


@dataclass(frozen=True)
class RunStates:
    """What one run's workers have left."""

    folder: Path
    """Folder of the run; its name is the `run-key` in the run's config.json."""
    workers: int
    """Workers that have a state."""
    newest_round: int
    """Newest round of any of them; 0 if no state is whole."""
    num_bytes: int
    """Bytes of all files."""
    changed: float
    """When the newest file was written, in seconds since 1970."""


def states_folder() -> Path:
    """Return the folder that holds all runs' states."""
    return cache_folder() / "workers"


def list_states(folder: Path | None = None) -> list[RunStates]:
    """Return what is there, the newest first.

    Parameters
    ----------
    folder : Path, optional
        A site's own `state-folder`; None is `states_folder()`.
    """
    runs = []
    for run in (folder or states_folder()).glob("*/"):
        if not any(run.glob("worker-*/")):
            continue
        files = [path for path in run.rglob("*") if path.is_file()]
        states = list(run.rglob("round-*"))
        rounds = [int(path.stem.removeprefix("round-")) for path in states]
        runs.append(
            RunStates(
                folder=run,
                workers=len({path.parent for path in states}),
                newest_round=max(rounds, default=0),
                num_bytes=sum(path.stat().st_size for path in files),
                changed=max([path.stat().st_mtime for path in files], default=0.0),
            )
        )
    return sorted(runs, key=lambda run: run.changed, reverse=True)


@app.command("list")
def show(folder: _Folder = None) -> None:
    """Show the runs, the newest first."""
    table = Table("run key", "workers", "round", "size", "last written")
    for run in list_states(folder):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
        row = (str(run.workers), str(run.newest_round), decimal(run.num_bytes), when)
        table.add_row(run.folder.name, *row)
    console = Console()
    console.print(table)
    console.print(
        f"in {folder or states_folder()}; a run's config.json says its run-key", soft_wrap=True
    )


@app.command()
def remove(
    run_keys: Annotated[list[str] | None, typer.Argument(help="Run keys, as `list` shows.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Remove all runs' states.")] = False,
    folder: _Folder = None,
) -> None:
    """Remove the states of runs; a run resumed after that starts its moments afresh."""
    runs = {run.folder.name: run for run in list_states(folder)}
    chosen = list(runs) if every else run_keys or []
    if not chosen:
        raise typer.BadParameter("allowed is one run key or more, or --all")
    if unknown := [key for key in chosen if key not in runs]:
        raise typer.BadParameter(f"{unknown[0]!r}: allowed is one of {', '.join(runs) or 'none'}")
    for key in chosen:
        shutil.rmtree(runs[key].folder)
    freed = sum(runs[key].num_bytes for key in chosen)
    Console().print(f"Removed {len(chosen)} runs' states, {decimal(freed)}")


if __name__ == "__main__":
    app()
