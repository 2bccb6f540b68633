"""A sweep over real `flwr run`s: what it leaves, and that kill -9 changes none of it."""

import fcntl
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from simulations.experiment import load_experiment
from simulations.outcome import write_results
from simulations.runs import Resources, Runs
from simulations.sweep import sweep

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 3
RESOURCES = Resources(jobs=1, cpus_per_client=2, gpus_per_client=0.0, threads=1)
SAME = ("round", "eval-loss", "train-loss", "tokens", "bytes-up", "bytes-down", "replies-used")

EXPERIMENT = """
title = "Tiny"
question = "Does it run?"
report = {x = "workers", lines = "method"}

[config]
"inner.steps" = 4
"inner.precision" = "fp32"
"global-batch-size" = 4
"evaluation.sequences" = 16

[axes.method.data-parallel]
data-parallel = true
only.workers = [1]

[axes.method.isoloco]
"strategy.name" = "isoloco"
only.workers = [2]

[axes]
workers = [1, 2]

[scales.laptop]
budget-tokens = 6144
cpus-per-client = 2
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return the command of a sweep and the folder of its runs."""
    monkeypatch.setenv("ISOLOCO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.toml"
    path.write_text(EXPERIMENT)

    def make(place: str):
        runs = tmp_path / place
        line = [sys.executable, "-m", "simulations", "run", str(path), "--runs", str(runs)]
        return line, runs / "tiny"

    return make


def rounds_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else -1


def kill_when(line: list[str], condition, may_end: bool = False) -> None:
    """Start a sweep and kill -9 it, and only it, as soon as a condition holds."""
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 500
        while not condition():
            if process.poll() is not None:
                assert may_end, process.stdout.read()
                break
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def finish(line: list[str]) -> str:
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result(folder: Path) -> dict:
    """Return everything of the runs that no clock and no process decides."""
    found = {}
    for own in sorted(path for path in folder.iterdir() if path.is_dir()):
        rows = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
        files = {str(path.relative_to(own)) for path in own.rglob("*") if path.is_file()}
        end = json.loads((own / "finished.json").read_text())
        found[own.name] = {
            "rows": [{key: row[key] for key in SAME} for row in rows],
            "files": {name for name in files if "tensorboard" not in name},
            "run": (own / "run.json").read_bytes(),
            "end": {key: value for key, value in end.items() if key != "seconds"},
            "model": (own / "model" / "model.safetensors").read_bytes(),
            "curves": scalars(own / "tensorboard"),
        }
    return found


def scalars(folder: Path) -> list[tuple[int, float]]:
    """Return the held-out losses that TensorBoard shows."""
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars("eval-loss")]


def still_running(mark: str) -> list[str]:
    """Return the processes with a variable in their environment, as the sweep's own have."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def wait_until_free(folder: Path) -> None:
    """Wait until a killed sweep's folder is free, which is when all it has started has ended."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


@pytest.mark.e2e
def test_killed_and_started_again_it_ends_as_undisturbed(command, tmp_path):
    line, undisturbed = command("undisturbed")
    finish(line)
    line, killed = command("killed")
    kill_when(line, lambda: rounds_done(killed / "data-parallel_workers-1") >= 1)
    kill_when(line, lambda: rounds_done(killed / "isoloco_workers-2") >= 1)

    wait_until_free(killed)
    assert still_running(f"ISOLOCO_CACHE={tmp_path / 'cache'}") == []

    finish(line)
    expected = result(undisturbed)
    assert expected.keys() == {"data-parallel_workers-1", "isoloco_workers-2"}
    assert result(killed) == expected
    for run in expected.values():
        assert run["curves"] == [
            (row["round"], pytest.approx(row["eval-loss"], rel=1e-6)) for row in run["rows"]
        ]
        assert [row["round"] for row in run["rows"]] == list(range(ROUNDS + 1))
        assert {"finished.json", "flwr.log", "config.json"} <= run["files"]
        assert not any("checkpoint" in name for name in run["files"])
    # Both end at the same tokens, and finished runs leave no worker's state behind.
    assert {run["rows"][-1]["tokens"] for run in expected.values()} == {6144}
    assert not list((tmp_path / "cache" / "workers").glob("*"))

    # What was done here need not be done on another machine that has its results.
    scale = load_experiment(str(tmp_path / "tiny.toml")).scales["laptop"]
    here = Runs(undisturbed)
    write_results(tmp_path / "results.jsonl", map(here.outcome, here.plan(scale)[0]))
    elsewhere = Runs(tmp_path / "elsewhere", tmp_path / "results.jsonl")
    assert all(map(elsewhere.is_finished, elsewhere.plan(scale)[0]))
    assert sweep(elsewhere, scale, RESOURCES) == []
    assert not list((tmp_path / "elsewhere").glob("*_*"))

    # Started once more it finds nothing to do, in no time.
    assert "0 of 2 runs to do" in finish(line)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_killed_at_moments_drawn_it_ends_as_undisturbed(command, tmp_path, seed):
    path = tmp_path / "tiny.toml"
    path.write_text(
        EXPERIMENT.replace(
            "[axes]\n",
            '[axes.method.diloco]\n"strategy.name" = "diloco"\nonly.workers = [2]\n\n[axes]\n',
        ).replace("cpus-per-client = 2", "cpus-per-client = 2\njobs = 2")
    )
    line, undisturbed = command("undisturbed")
    finish(line)
    expected = result(undisturbed)
    assert len(expected) == 3

    line, killed = command("killed")
    moments = random.Random(seed)
    # The sweep does 3 runs with 4 lines of metrics each, one before training.
    for lines in sorted(moments.sample(range(12), 3)):
        after = moments.uniform(0, 2)
        reached: list[float] = []

        def is_due(lines=lines, after=after, reached=reached) -> bool:
            if sum(rounds_done(killed / run) + 1 for run in expected) >= lines:
                reached.append(time.monotonic())
            return bool(reached) and time.monotonic() >= reached[0] + after

        kill_when(line, is_due, may_end=True)
        if (killed / ".lock").exists():
            wait_until_free(killed)
        assert still_running(f"ISOLOCO_CACHE={tmp_path / 'cache'}") == []
    finish(line)
    assert result(killed) == expected


@pytest.mark.e2e
def test_a_failed_run_is_set_apart_with_its_logs_and_the_others_are_done(command, tmp_path):
    line, folder = command("runs")
    path = tmp_path / "tiny.toml"
    path.write_text(EXPERIMENT.replace('"isoloco"', '"isoloco"\n"data.source" = "/nowhere"'))
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert "1 runs failed" in done.stderr
    assert (folder / "data-parallel_workers-1" / "finished.json").exists()
    assert not (folder / "isoloco_workers-2").exists()
    log = (folder / "failed" / "isoloco_workers-2" / "flwr.log").read_text()
    assert "/nowhere" in log

    # A finished run that something else has decided is refused, not taken for another.
    path.write_text(EXPERIMENT.replace('"inner.steps" = 4', '"inner.steps" = 6'))
    refused = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert refused.returncode == 1
    assert "inner.steps was 4, is 6" in refused.stderr
