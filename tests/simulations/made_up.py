"""An experiment and results of its runs that are made up, so that their numbers are known."""

from simulations.experiment import Run
from simulations.outcome import Outcome

ROUNDS = 4
PARAMETERS = 1000

EXPERIMENT = """
title = "Merges & <workers>"
question = "Which one?"
report = {x = "workers", lines = "method"}

[config]
"inner.steps" = 5
"global-batch-size" = 8

[axes.method.data-parallel]
data-parallel = true
only.workers = [1]

[axes.method.diloco]
"strategy.name" = "diloco"
only.workers = [2, 4]
grid."strategy.outer-lr" = [0.5, 0.7]

[axes.method.isoloco]
"strategy.name" = "isoloco"
only.workers = [2, 4]

[axes]
workers = [1, 2, 4]
seed = [0, 1]

[scales.laptop]
budget-tokens = 20_480
tune = {seed = 0}
"""

LOSSES = {"data-parallel": 2.0, "diloco": 2.5, "isoloco": 2.25}


def loss_of(run: Run) -> float:
    """Return a made-up loss: worse with workers, at a bad rate, and with the second seed."""
    worse_rate = 0.3 if run.grid.get("strategy.outer-lr") == 0.5 else 0.0
    workers = 0.0 if run.data_parallel else run.workers / 8
    return LOSSES[run.point["method"]] + workers + worse_rate + 0.02 * int(run.point["seed"])


def rows_of(run: Run) -> list[dict]:
    """Return the lines of metrics of a run."""
    rows = [
        {
            "round": number,
            "eval-loss": loss_of(run) + ROUNDS - number,
            "train-loss": None if number == 0 else 3.0,
            "tokens": number * 5120,
            "bytes-up": 0 if run.data_parallel or number == 0 else 4000 * run.workers,
            "bytes-down": 0 if run.data_parallel or number == 0 else 4000 * run.workers,
            "replies-used": 0 if number == 0 else run.workers,
            "aggregate-seconds": 0.25,
            "load-seconds": None if number == 0 else 0.5,
            "train-seconds": None if number == 0 else 1.5,
            "save-seconds": None if number == 0 else 0.125,
            "seconds": 3.0,
        }
        for number in range(ROUNDS + 1)
    ]
    if run.point["method"] == "isoloco":
        for row in rows[1:]:
            row["diagnostics"] = {
                name: {"interference": 0.5 * scale, "condition": None if name == "b" else 7.0}
                for name, scale in {"a": 1.0, "b": 0.5}.items()
            }
    return rows


def outcome(run: Run) -> Outcome:
    """Return what a run has left."""
    return Outcome(
        run=run.name,
        point=dict(run.point),
        tuned=dict(run.grid),
        workers=run.workers,
        data_parallel=run.data_parallel,
        run_config={"inner.steps": 5, **run.config},
        command=f"flwr run . --of {run.name} '<&>'",
        num_parameters=PARAMETERS,
        versions={"torch": "9.9"},
        rows=rows_of(run),
    )
