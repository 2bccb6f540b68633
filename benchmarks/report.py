"""What every benchmark shares: timing, the machine's description, and the files written."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

RESULTS = Path(__file__).parent / "results"

Row = Mapping[str, object]
Key = TypeVar("Key")


def machine(device: str = "cpu") -> dict[str, object]:
    """Return what the figures depend on: processor, threads, load, versions."""
    about: dict[str, object] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "flwr": version("flwr"),
    }
    if device != "cpu":
        about["device"] = torch.cuda.get_device_name(device)
    return about


def interleaved(
    functions: Mapping[Key, Callable[[], object]], repeats: int, device: str = "cpu"
) -> dict[Key, list[float]]:
    """Return the seconds of each function, round by round.

    Every round runs all of them once, so that a slow moment of the machine falls on all alike:
    compare within rounds, then take medians. A first round warms up and does not count.
    """
    times: dict[Key, list[float]] = {name: [] for name in functions}
    for number in range(repeats + 1):
        for name, function in functions.items():
            _wait(device)
            start = time.perf_counter()
            function()
            _wait(device)
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def median_ratio(slow: Sequence[float], quick: Sequence[float]) -> float:
    """Return the median over the rounds of how many times longer the first took."""
    return statistics.median(a / b for a, b in zip(slow, quick, strict=True))


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table, the first row's keys as its head."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([str(row[key]) for key in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(
    name: str, title: str, sections: Mapping[str, Sequence[Row]], device: str = "cpu"
) -> Path:
    """Write a benchmark's tables as results/NAME.md and .json; return the path of the former."""
    about = machine(device)
    described = ", ".join(f"{key} {value}" for key, value in about.items())
    parts = [f"# {title}", f"Measured with: {described}."]
    for heading, rows in sections.items():
        parts += [f"## {heading}", table(rows)]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text("\n\n".join(parts) + "\n")
    record = {"machine": about, "sections": sections}
    path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    return path


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
