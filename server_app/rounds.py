"""What happens at the end of each round: a look at held-out text, a line of metrics, a log line."""

import json
import time
from collections.abc import Mapping
from logging import INFO
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.supercore import log
from numpy.typing import NDArray
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedModel

from isoloco_flwr.pretraining.evaluate import held_out_loss
from isoloco_flwr.pretraining.model import load_tensors
from isoloco_flwr.records import tensors_from_record
from isoloco_flwr.settings import RunSettings
from isoloco_flwr.strategy import MergeStrategy
from server_app.health import Health

__all__ = ["Rounds"]

_FROM_STRATEGY = (
    "bytes-up",
    "bytes-down",
    "replies-used",
    "replies-rejected",
    "aggregate-seconds",
)

_COUNTS = {
    "inner-steps": "inner-steps",
    "skipped-steps": "skipped-steps",
    "worker-states-lost": "state-lost",
    "rounds-missed": "rounds-missed",
}
"""Sums over the workers: name in a line, and in their metrics."""

_MEANS = ("epochs", "load-seconds", "train-seconds", "save-seconds")
"""Means over the workers; None where no worker has answered."""


class Rounds:
    """Score the global model and write `metrics.jsonl`, one line a round.

    Parameters
    ----------
    settings : RunSettings
        The run's settings.
    strategy : MergeStrategy
        Where the metrics of the newest round's training are.
    model : PreTrainedModel
        Scratch model that the global parameters are loaded into.
    held_out : NDArray[np.integer]
        Held-out tokens.
    context : int
        Tokens of a sequence.
    metrics_file : Path
        File that the lines are appended to.
    health : Health, optional
        Who is told of each line.
    """

    def __init__(
        self,
        *,
        settings: RunSettings,
        strategy: MergeStrategy,
        model: PreTrainedModel,
        held_out: NDArray[np.integer],
        context: int,
        metrics_file: Path,
        health: Health | None = None,
    ) -> None:
        self.rows = _read_rows(metrics_file)
        self._settings = settings
        self._strategy = strategy
        self._model = model
        self._held_out = held_out
        self._context = context
        self._metrics_file = metrics_file
        self._health = health
        self._scalars: SummaryWriter | None = None
        self._started = time.perf_counter()

    def close(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """End a round (0: before training); an `evaluate_fn` for `MergeStrategy.start`."""
        self._forget_from(server_round)
        loss = self._evaluate(arrays) if self._is_due(server_round) else None
        # Flower's own metrics may be lists; those of our clients and our strategy are numbers.
        train = cast(Mapping[str, float], self._strategy.train_metrics)
        counters = {key: train.get(key, 0) for key in _FROM_STRATEGY}
        tokens_before = self.rows[-1]["tokens"] if self.rows else 0
        now = time.perf_counter()
        row: dict[str, Any] = {
            "round": server_round,
            "eval-loss": loss,
            "train-loss": train.get("train-loss"),
            "tokens": tokens_before + round(train.get("num-examples", 0)) * self._context,
            **counters,
            **{name: round(train.get(key, 0)) for name, key in _COUNTS.items()},
            **{key: train.get(key) for key in _MEANS},
            **({"diagnostics": figures} if (figures := self._strategy.engine.figures) else {}),
            "seconds": now - self._started,
        }
        self._started = now
        self.rows.append(row)
        with self._metrics_file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._write_scalars(row)
        if self._health:
            self._health.update(row)
        log(
            INFO,
            "Round %d of %d: held-out loss %s, training loss %s, %.2f M tokens, %.1f s",
            server_round,
            self._settings.num_server_rounds,
            _number(loss),
            _number(row["train-loss"]),
            row["tokens"] / 1e6,
            row["seconds"],
        )
        return None if loss is None else MetricRecord({"eval-loss": loss})

    def _write_scalars(self, row: Mapping[str, Any]) -> None:
        """Write the round's numbers for TensorBoard, over the rounds."""
        if self._scalars is None:
            # purge_step hides what rounds wrote that were cut off before their checkpoint.
            self._scalars = SummaryWriter(
                str(self._metrics_file.parent / "tensorboard"), purge_step=row["round"]
            )
        numbers = {key: value for key, value in row.items() if key not in ("round", "diagnostics")}
        for name, figures in row.get("diagnostics", {}).items():
            numbers |= {f"{key}/{name}": value for key, value in figures.items()}
        for key, value in numbers.items():
            if value is not None:
                self._scalars.add_scalar(key, value, row["round"])
        self._scalars.flush()

    def _forget_from(self, server_round: int) -> None:
        """Drop the lines of rounds that were cut off before their checkpoint."""
        kept = [row for row in self.rows if row["round"] < server_round]
        if len(kept) < len(self.rows):
            self.rows = kept
            _write_rows(self._metrics_file, kept)

    def _is_due(self, server_round: int) -> bool:
        every = self._settings.evaluation.every
        first_or_last = server_round in (0, self._settings.num_server_rounds)
        return first_or_last or (every > 0 and server_round % every == 0)

    def _evaluate(self, arrays: ArrayRecord) -> float:
        load_tensors(self._model, tensors_from_record(arrays))
        return held_out_loss(
            self._model,
            self._held_out,
            context=self._context,
            max_sequences=self._settings.evaluation.sequences,
        )


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the lines that a resumed run has written, without a last one that was cut."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    if len(rows) < len(lines):
        _write_rows(path, rows)
    return rows


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    part.replace(path)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
