"""Memory of a whole simulation: 64 virtual clients send a 120 MB model back, for two rounds.

`python -m benchmarks.simulation_memory [--strategy IsoLoCo] [--clients 64]` runs a do-nothing
ClientApp in a real `flwr run` and samples the proportional set size of all its processes together
(Linux only): the SuperLink, the ServerApp with the simulation engine, Ray, and the client actors.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from benchmarks.flower_app import write_app
from benchmarks.report import write
from simulations.flower import flwr_run, local_superlink

APP = """
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from isoloco_flwr import DiLoCo, IsoLoCo

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    content = RecordDict(
        {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    # 30 M parameters in matrices of 1000 x 1000.
    model = {f"layer{index}.weight": torch.randn(1000, 1000) for index in range(30)}
    strategy = STRATEGY(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    strategy.start(grid, ArrayRecord(model), num_rounds=context.run_config["rounds"])
"""


def memory(flwr_home: Path) -> int:
    """Return the bytes that all processes of a FLWR_HOME take together."""
    mark = f"FLWR_HOME={flwr_home}".encode()
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                rollup = (process / "smaps_rollup").read_text()
                total += 1024 * int(rollup.split("\nPss:", 1)[1].split()[0])
        except (OSError, IndexError):
            continue  # it has ended
    return total


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation_memory")
    parser.add_argument("--strategy", default="IsoLoCo", choices=["FedAvg", "DiLoCo", "IsoLoCo"])
    parser.add_argument("--clients", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        app, home = Path(scratch) / "app", Path(scratch) / "flwr"
        source = APP.replace("STRATEGY", arguments.strategy)
        source = source.replace("CLIENTS", str(arguments.clients))
        write_app(app, "donothing", {"apps": source}, config="rounds = 2")
        peak = 0
        rounds: list[float] = []
        started = time.monotonic()
        with (
            local_superlink(home) as superlink,
            flwr_run(superlink, app, num_supernodes=arguments.clients, run_config={}) as process,
        ):
            reader = threading.Thread(target=_collect, args=(process.stdout, rounds), daemon=True)
            reader.start()
            while process.poll() is None:
                peak = max(peak, memory(home))
                time.sleep(0.3)
            reader.join()
    if len(rounds) != 2:
        raise SystemExit(f"the run ended after {len(rounds)} of 2 rounds")
    row = {
        "strategy": arguments.strategy,
        "clients": arguments.clients,
        "model": "120 MB",
        "peak of all processes": f"{peak / 1e9:.2f} GB",
        "seconds, the first with the start": ", ".join(
            f"{end - start:.0f}" for start, end in zip([started, *rounds], rounds, strict=False)
        ),
    }
    name = f"simulation_memory_{arguments.strategy.lower()}"
    print(write(name, "Memory of a simulation", {"Two rounds of a do-nothing client": [row]}))


def _collect(output: IO[str] | None, rounds: list[float]) -> None:
    """Note the time at which each round was aggregated."""
    assert output is not None
    for line in output:
        if "aggregate_train" in line:
            rounds.append(time.monotonic())


if __name__ == "__main__":
    main()
