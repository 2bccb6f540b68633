"""A run that is killed and resumed ends with the bits of the undisturbed one."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from simulations.flower import SuperLink, flwr_run

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 6


def config(output, **overrides):
    return {
        "num-server-rounds": ROUNDS,
        "global-batch-size": 4,
        "inner.steps": 4,
        "evaluation.sequences": 16,
        "output-dir": str(output),
        **overrides,
    }


def kill_simulation(superlink: SuperLink) -> None:
    """Kill -9 the process that holds ServerApp and simulation of this SuperLink."""
    port = superlink.environment["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if "flwr-simulation" in command and f"127.0.0.1:{port}" in command:
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError("no simulation is running")


def run_until(superlink, run_config, condition) -> None:
    """Start a run and kill it as soon as a condition holds."""
    with flwr_run(superlink, ROOT, num_supernodes=2, run_config=run_config) as process:
        deadline = time.monotonic() + 240
        while not condition():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        kill_simulation(superlink)


def rounds_done(output):
    path = output / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else -1


def test_killed_twice_and_resumed_is_undisturbed(run, superlink, tmp_path):
    log = run(ROOT, num_supernodes=2, run_config=config(tmp_path / "undisturbed"))
    output = tmp_path / "killed"
    checkpoints = output / "checkpoints"

    # In the middle of round 3: two rounds are written down, the workers are training.
    run_until(superlink, config(output), lambda: rounds_done(output) == 2)
    # While the checkpoint of round 4 or a later one is being written.
    run_until(
        superlink,
        config(output, resume=True),
        lambda: rounds_done(output) >= 4 and list(checkpoints.glob(".part-*")),
    )
    resumed_log = run(ROOT, num_supernodes=2, run_config=config(output, resume=True))
    assert "Resuming after round" in resumed_log

    first, second = (
        (folder / "model" / "model.safetensors").read_bytes()
        for folder in (tmp_path / "undisturbed", output)
    )
    assert first == second, log
    rows, expected = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (output, tmp_path / "undisturbed")
    )
    assert [row["round"] for row in rows] == list(range(ROUNDS + 1))
    for row, other in zip(rows, expected, strict=True):
        for key in ("eval-loss", "train-loss", "tokens", "replies-used", "worker-states-lost"):
            assert row[key] == other[key]
        assert row["worker-states-lost"] == 0
    assert not list(checkpoints.glob(".part-*"))


@pytest.mark.parametrize("change", [{"inner.lr": 1e-3}])
def test_changed_settings_are_refused(change, run, tmp_path):
    output = tmp_path / "run"
    run(ROOT, num_supernodes=2, run_config=config(output, **{"num-server-rounds": 1}))
    before = (output / "metrics.jsonl").read_bytes()
    log = run(
        ROOT,
        num_supernodes=2,
        run_config=config(output, resume=True, **{"num-server-rounds": 1, **change}),
    )
    assert "inner.lr was 0.004, is 0.001" in log
    assert (output / "metrics.jsonl").read_bytes() == before
