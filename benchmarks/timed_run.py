"""A `flwr run` of the project's own app that tells where the seconds of its rounds went."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plain_loop import Loop
from isoloco_flwr.pretraining.model import MODEL_PRESETS
from simulations.flower import SuperLink, flwr_run

__all__ = ["Round", "Setup", "copy_app", "round_parts", "timed_rounds"]

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Setup:
    """What both sides do."""

    workers: int
    """R."""
    processes: int
    """Processes that train at a time."""
    threads: int
    """Threads of each."""
    preset: str
    """The model."""
    tokenizer: str
    """`bytes` or a folder."""
    device: str
    """cpu or cuda."""
    steps: int
    """H."""
    global_batch_size: int
    """Sequences of one inner step over all workers."""
    micro_batch_size: int
    """Sequences at once; 0: the whole batch of a worker."""

    @property
    def tokens(self) -> int:
        """Tokens of a round."""
        return self.global_batch_size * self.steps * MODEL_PRESETS[self.preset].context

    def loop(self, workers: Iterable[int], rounds: int) -> Loop:
        """Return the plain loop over some workers."""
        batch_size = self.global_batch_size // self.workers
        return Loop(
            preset=self.preset,
            tokenizer=self.tokenizer,
            workers=list(workers),
            num_workers=self.workers,
            batch_size=batch_size,
            micro_batch_size=self.micro_batch_size or batch_size,
            steps=self.steps,
            rounds=rounds,
            device=self.device,
        )


@dataclass(frozen=True)
class Round:
    """The seconds of a round; the parts add up to the whole."""

    total: float
    """The whole round."""
    send: float
    """Until the first worker begins."""
    load: float
    """Workers: global parameters and the optimizer's state."""
    train: float
    """Workers: inner steps."""
    save: float
    """Workers: the optimizer's state and the reply."""
    between: float
    """From a worker's end to the next one's begin in the same process."""
    reply: float
    """From the last worker's end until the server has its reply."""
    close: float
    """What is left of the merge, the outer step, the checkpoint, metrics."""


def copy_app(folder: Path) -> Path:
    """Copy the app into a folder, with `timed_app` in the place of its components."""
    for name in ("isoloco_flwr", "clients", "server_app"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("README.md", "LICENSE", "benchmarks/timed_app.py"):
        shutil.copy(ROOT / file, folder)
    project = (ROOT / "pyproject.toml").read_text()
    for own, timed in (
        ('"server_app.server_app:app"', '"timed_app:server_app"'),
        ('"clients.client_app:app"', '"timed_app:client_app"'),
        ('fab-include = ["', 'fab-include = ["timed_app.py", "'),
    ):
        if project.count(own) != 1:
            raise SystemExit(f"pyproject.toml: {own} must be there once")
        project = project.replace(own, timed)
    (folder / "pyproject.toml").write_text(project)
    return folder


def timed_rounds(
    setup: Setup, link: SuperLink, app: Path, output: Path, rounds: int
) -> list[Round]:
    """Run the app for so many rounds, with one before them to warm up and one after them.

    The server looks at held-out text before the first and after the last.
    """
    log_file = output.with_suffix(".log")
    with flwr_run(
        link,
        app,
        num_supernodes=setup.workers,
        run_config={
            "num-server-rounds": rounds + 2,
            "global-batch-size": setup.global_batch_size,
            "inner.steps": setup.steps,
            "inner.micro-batch-size": setup.micro_batch_size,
            "model.preset": setup.preset,
            "data.tokenizer": setup.tokenizer,
            "evaluation.every": 0,
            "evaluation.sequences": 16,
            "output-dir": str(output),
        },
        cpus_per_client=max(1, (os.cpu_count() or 1) // setup.processes),
        gpus_per_client=1 / setup.processes if setup.device == "cuda" else 0.0,
        log_file=log_file,
    ) as process:
        process.wait()
    if not (output / "model").is_dir():
        tail = log_file.read_text(errors="replace").splitlines()[-25:]
        raise SystemExit("\n".join([*tail, "the run failed"]))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    notes = [json.loads(line) for line in Path(f"{output}.times").read_text().splitlines()]
    return [
        round_parts(setup, row, [note for note in notes if note["round"] == row["round"]])
        for row in rows[2:-1]  # rows[0] is the look before training
    ]


def round_parts(setup: Setup, row: Mapping[str, Any], notes: list[dict[str, Any]]) -> Round:
    """Share out a round's seconds: a line of metrics.jsonl and the notes of when what happened."""
    [sent] = [note for note in notes if note["kind"] == "send"]
    trained = [note for note in notes if note["kind"] == "train"]
    received = max(note["end"] for note in notes if note["kind"] == "receive")
    if row["replies-used"] != setup.workers or len(trained) != setup.workers:
        raise SystemExit(
            f"round {row['round']} has {row['replies-used']} of {setup.workers} replies"
        )
    first = min(note["start"] for note in trained)
    last = max(note["end"] for note in trained)
    # A mean over workers is this often in the wall-clock time.
    often = setup.workers / setup.processes
    load, train, save = (often * row[f"{part}-seconds"] for part in ("load", "train", "save"))
    return Round(
        total=row["seconds"],
        send=first - sent["start"],
        load=load,
        train=train,
        save=save,
        between=last - first - load - train - save,
        reply=received - last,
        close=row["seconds"] - (received - sent["start"]),
    )
