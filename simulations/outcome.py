"""What finished runs have left, read from their folders or from a `results.jsonl`."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "read_outcome", "read_results", "write_results"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished run."""

    run: str
    """Its id."""
    point: dict[str, str]
    """By axis, the name of the option."""
    tuned: dict[str, Any]
    """Values of the tuned keys."""
    workers: int
    """R."""
    data_parallel: bool
    """Whether it is the data-parallel baseline."""
    run_config: dict[str, Any]
    """What the experiment set of the run config."""
    command: str
    """The line that does this run by itself."""
    num_parameters: int
    """Of the model."""
    versions: dict[str, str]
    """Versions of everything that can change a result."""
    rows: list[dict[str, Any]]
    """The lines of metrics.jsonl."""

    @property
    def loss(self) -> float:
        """Held-out loss at the end, in nats a token."""
        return float(self.rows[-1]["eval-loss"])

    @property
    def seconds(self) -> float:
        """Time of all rounds."""
        return float(sum(row["seconds"] for row in self.rows))

    @property
    def steps(self) -> int:
        """Inner steps that every worker has taken."""
        return int(self.run_config["num-server-rounds"]) * int(self.run_config["inner.steps"])

    def replies_lost(self) -> int:
        """Return how many workers' replies over all rounds went into no outer step."""
        if self.data_parallel:
            return 0
        return sum(self.workers - row["replies-used"] for row in self.rows if row["round"] > 0)

    def bytes_per_worker(self) -> list[float]:
        """Return the bytes that a worker has sent and received up to each row.

        A data-parallel run sends nothing here, being one process. It is taken for one whose workers
        each send a gradient and receive a parameter of four bytes at every step.
        """
        if self.data_parallel:
            a_round = 8.0 * self.num_parameters * self.run_config["inner.steps"]
            return [a_round * row["round"] for row in self.rows]
        total = 0.0
        sums = []
        for row in self.rows:
            total += (row["bytes-up"] + row["bytes-down"]) / self.workers
            sums.append(total)
        return sums


def read_outcome(folder: Path) -> Outcome:
    """Read a finished run's folder."""
    run = json.loads((folder / "run.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run_config = {"inner.steps": config["run-config"]["inner.steps"], **run["run-config"]}
    return Outcome(
        run=run["run"],
        point=run["point"],
        tuned=run["tuned"],
        workers=run["workers"],
        data_parallel=run["data-parallel"],
        run_config=run_config,
        command=run["command"],
        num_parameters=config["num-parameters"],
        versions=config["versions"],
        rows=rows,
    )


def write_results(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Write runs into one file, a line each, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes))
    os.replace(part, path)


def read_results(path: Path) -> list[Outcome]:
    """Read what `write_results` has written."""
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
