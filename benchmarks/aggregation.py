"""Aggregating a round of 128 replies: time beside Flower's FedAvg, memory beside 8 replies.

`python -m benchmarks.aggregation [--replies N] [--rounds N]` writes results/aggregation.md and
.json. Times: every strategy and FedAvg aggregate the same replies in one process, rounds
interleaved, medians. Memory: one process a figure, the replies handed over as a stream (Linux).
"""

import argparse
import logging
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from benchmarks.report import Row, interleaved, median_ratio, write
from isoloco_flwr import DARE, TIES, TSVM, DiLoCo, IsoCTS, IsoLoCo, LocalSGD, MergeStrategy
from isoloco_flwr.scratch import give_back_freed_memory

MEAN_BASED: dict[str, Callable[..., MergeStrategy]] = {
    "LocalSGD": LocalSGD,
    "DiLoCo": DiLoCo,
    "IsoLoCo": IsoLoCo,
    "IsoLoCo, polar=fast": partial(IsoLoCo, merge_options={"polar": "fast"}),
}
STRATEGIES: dict[str, Callable[..., MergeStrategy]] = {
    **MEAN_BASED,
    "IsoCTS": IsoCTS,
    "TSVM": TSVM,
    "TIES": TIES,
    "DARE": DARE,
}
BOUND = {"LocalSGD": 1.0, "DiLoCo": 0.3, "IsoLoCo": 0.5, "IsoLoCo, polar=fast": 0.5}
"""Share of FedAvg's time that a strategy may take."""


def llama_tensors(
    hidden: int = 256, mlp: int = 688, layers: int = 6, vocabulary: int = 257
) -> dict[str, torch.Tensor]:
    """Return the parameters of a Llama of 19.5 MB by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (vocabulary, hidden),
        "head": (vocabulary, hidden),
        "norm": (hidden,),
    }
    for layer in range(layers):
        layer_shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("q", "k", "v", "o"), (hidden, hidden)),
            **dict.fromkeys(("gate", "up"), (mlp, hidden)),
            "down": (hidden, mlp),
            **dict.fromkeys(("norm1", "norm2"), (hidden,)),
        }
        for name, shape in layer_shapes.items():
            shapes[f"layers.{layer}.{name}"] = shape
    generator = torch.Generator().manual_seed(0)
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Nodes:
    """As much of a Grid as `configure_train` asks for."""

    def __init__(self, count: int) -> None:
        self._ids = range(1, count + 1)

    def get_node_ids(self) -> list[int]:
        return list(self._ids)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, registered_at=f"{node:09d}") for node in self._ids]


def questions(strategy: FedAvg, model: ArrayRecord, count: int) -> list[Message]:
    """Let a strategy configure a round; the messages get the ids that a real Grid would give."""
    messages = list(strategy.configure_train(1, model, ConfigRecord(), Nodes(count)))  # type: ignore[arg-type]
    for message in messages:
        message.metadata.__dict__["_message_id"] = str(uuid4())
    return messages


def answer(question: Message, arrays: ArrayRecord) -> Message:
    """Reply with parameters."""
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=question)


def trained(model: dict[str, torch.Tensor], seed: int) -> ArrayRecord:
    """Return the model as a worker might have left it."""
    generator = torch.Generator().manual_seed(seed)
    return ArrayRecord(
        {
            name: value + 1e-3 * torch.randn(value.shape, generator=generator)
            for name, value in model.items()
        }
    )


def aggregation(
    make: Callable[..., FedAvg], model: ArrayRecord, payloads: list[ArrayRecord], count: int
) -> Callable[[], None]:
    """Return a function that aggregates one round with a new strategy."""
    strategy = make(min_train_nodes=count, min_available_nodes=count)

    def run() -> None:
        asked = questions(strategy, model, count)
        replies = list(map(answer, asked, payloads))
        arrays, _ = strategy.aggregate_train(1, replies)
        assert arrays is not None

    return run


def time_rows(count: int, rounds: int) -> list[Row]:
    """Time a round of every strategy beside FedAvg's."""
    tensors = llama_tensors()
    model = ArrayRecord(tensors)
    payloads = [trained(tensors, seed) for seed in range(count)]  # no cache holds them all
    makers: dict[str, Callable[..., FedAvg]] = {"FedAvg (Flower)": FedAvg, **MEAN_BASED}
    seconds = interleaved(
        {name: aggregation(make, model, payloads, count) for name, make in makers.items()}, rounds
    )
    megabytes = count * sum(value.nbytes for value in tensors.values()) / 1e6
    return [
        {
            "strategy": name,
            "ms": f"{1e3 * statistics.median(times):.0f}",
            "GB/s of replies": f"{megabytes / 1e3 / statistics.median(times):.1f}",
            "÷ FedAvg": f"{median_ratio(times, seconds['FedAvg (Flower)']):.2f}",
            "aim": f"≤ {BOUND[name]}" if name in BOUND else "",
        }
        for name, times in seconds.items()
    ]


def peak_extra_memory(name: str, count: int, first_last: bool) -> int:
    """Return by how many bytes the peak of this process grows while a round is aggregated.

    With `first_last` the reply that is added first comes last, so that all others wait for it.
    """
    tensors = llama_tensors()
    model = ArrayRecord(tensors)
    payloads = [trained(tensors, seed) for seed in range(8)]
    strategy = STRATEGIES[name](min_train_nodes=count, min_available_nodes=count)
    # A round of 2 first: what libraries load on their first call is not the round's.
    for replies in (2, count):
        strategy.min_train_nodes = strategy.min_available_nodes = replies
        asked = questions(strategy, model, replies)
        if first_last:
            asked.append(asked.pop(0))
        give_back_freed_memory()  # the round must not begin with room that nobody counts
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before = _status("VmRSS")
        arrays, _ = strategy.aggregate_train(1, _stream(asked, payloads))
        assert arrays is not None
        extra = _status("VmHWM") - before
        del arrays
    return extra


def _stream(asked: list[Message], payloads: list[ArrayRecord]) -> Iterator[Message]:
    """Yield replies whose bytes are their own, as those that come from a network are."""
    for place, question in enumerate(asked):
        yield answer(
            question,
            ArrayRecord(
                {
                    name: Array(array.dtype, tuple(array.shape), array.stype, _copy(array.data))
                    for name, array in payloads[place % len(payloads)].items()
                }
            ),
        )


def _copy(data: bytes) -> bytes:
    return bytes(bytearray(data))


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


def memory_rows(count: int) -> list[Row]:
    """Measure each strategy's peak in processes of their own."""
    tensors = llama_tensors()
    model = sum(value.nbytes for value in tensors.values())
    largest = max(value.nbytes for value in tensors.values())
    rows: list[Row] = []
    for name in STRATEGIES:
        few, many = (_measured(name, replies) for replies in (8, count))
        waiting = _measured(name, count, "--first-last")
        # Merges of the mean hold it alone; the others hold all workers' values of one parameter.
        bound = 3 * model + (100e6 if name in MEAN_BASED else count * largest)
        rows.append(
            {
                "strategy": name,
                "8 replies, MB": f"{few / 1e6:.0f}",
                f"{count} replies, MB": f"{many / 1e6:.0f}",
                "ratio": f"{many / few:.2f}",
                "the first comes last, MB": f"{waiting / 1e6:.0f}",
                "bound, MB": f"{bound / 1e6:.0f}",
            }
        )
    return rows


def _measured(name: str, count: int, *more: str) -> int:
    command = [sys.executable, "-m", "benchmarks.aggregation", "--memory", name]
    result = subprocess.run(
        [*command, "--replies", str(count), *more], capture_output=True, text=True, check=True
    )
    return int(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replies", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", choices=STRATEGIES, help="print one strategy's peak in bytes")
    parser.add_argument("--first-last", action="store_true", help="the first reply comes last")
    arguments = parser.parse_args()
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if arguments.memory:
        print(peak_extra_memory(arguments.memory, arguments.replies, arguments.first_last))
        return
    megabytes = sum(value.nbytes for value in llama_tensors().values()) / 1e6
    what = f"{arguments.replies} replies of {megabytes:.1f} MB"
    path = write(
        "aggregation",
        "Aggregating a round",
        {
            f"Time of a round, {what}": time_rows(arguments.replies, arguments.rounds),
            f"Peak memory beyond the model sent, replies of {megabytes:.1f} MB": memory_rows(
                arguments.replies
            ),
        },
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
