"""Sites as real processes on loopback: a model of 600 MB, and 24 sites at once.

`python -m benchmarks.sites large` sends 600 MB to two sites and back for one round;
`python -m benchmarks.sites many [--sites 24] [--rounds 5]` sends 1 MB to many sites for some
rounds and looks at the SuperLink's memory after each. The clients send back what they were sent.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

from benchmarks.flower_app import write_app
from benchmarks.report import write
from tests.federation import MARK, Federation, processes, wait_for

CONFIG = """
sites = 2
rounds = 1
arrays = 1
output = ""
"""

CLIENT = """
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    content = RecordDict(
        {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content, reply_to=message)
"""

SERVER = """
import time

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from isoloco_flwr import LocalSGD

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    # 2.5 M parameters, 10 MB, in each array; or a tenth of that if there is only one.
    rows = 2500 if config["arrays"] > 1 else 250
    model = {f"layer{n}.weight": torch.randn(rows, 1000) for n in range(config["arrays"])}
    sites = config["sites"]
    strategy = LocalSGD(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)

    def note(server_round, arrays):
        with open(config["output"], "a") as file:
            used = strategy.train_metrics.get("replies-used", 0)
            file.write(f"{server_round} {used} {time.time()}\\n")

    strategy.start(grid, ArrayRecord(model), num_rounds=config["rounds"], evaluate_fn=note)
"""


def memory(federation: Federation, program: str) -> float:
    """Return the megabytes that a program of the SuperLink's takes."""
    for pid in processes(f"{MARK}={federation.folder}/superlink"):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if program in command and "guard.py" not in command:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            return int(rollup.split("\nPss:", 1)[1].split()[0]) / 1e3
    raise SystemExit(f"{program} does not run")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def measure(sites: int, rounds: int, arrays: int) -> list[dict[str, object]]:
    """Run it; return a row a round."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch, Federation(Path(scratch) / "here") as federation:
        app = write_app(
            Path(scratch) / "app",
            "echo",
            {"client": CLIENT, "server": SERVER},
            server="server:app",
            client="client:app",
            config=CONFIG,
        )
        federation.start_superlink()
        for place in range(sites):
            federation.start_site(place, sites)
        # Not the run's log: Flower stops to stream it when its database was locked once.
        notes = Path(scratch) / "notes"
        notes.touch()
        run = federation.run(
            {"sites": sites, "rounds": rounds, "arrays": arrays, "output": str(notes)}, app=app
        )
        for number in range(rounds + 1):
            wait_for(lambda n=number: len(_lines(notes)) > n, 3600, "a round")  # type: ignore[misc]
            if number:
                megabytes = memory(federation, "flower-superlink")
                rows.append({"round": number, "SuperLink, MB": f"{megabytes:.0f}"})
        run.wait(timeout=600)
        noted = [line.split() for line in _lines(notes)]
    for row, (before, after) in zip(rows, itertools.pairwise(noted), strict=True):
        row["seconds"] = f"{float(after[2]) - float(before[2]):.1f}"
        row["replies used"] = after[1]
    return rows


def main() -> None:
    """Run a benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sites")
    parser.add_argument("which", choices=["large", "many"])
    parser.add_argument("--sites", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.which == "large":
        rows = measure(sites=2, rounds=1, arrays=60)
        print(write("sites_large", "A model of 600 MB", {"Two sites, one round": rows}))
    else:
        rows = measure(sites=arguments.sites, rounds=arguments.rounds, arrays=1)
        title = f"{arguments.sites} sites, 1 MB"
        print(write("sites_many", "Many sites", {title: rows}))


if __name__ == "__main__":
    main()
