"""Sites as real processes, each with its own node config; one of them is killed and comes back."""

import json
import signal
import urllib.request

import pytest
import torch
from federation import Federation, free_port, wait_for
from safetensors.torch import load_file
from sites import BATCH, RUN_CONFIG, STEPS, answer, checkpoint, vector, whose_mean

SITES, ROUNDS = 2, 3


@pytest.fixture
def federation(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOLOCO_CACHE", str(tmp_path / "cache"))
    with Federation(tmp_path) as started:
        yield started


def get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}


def test_a_site_without_time_and_one_that_is_killed(federation, tmp_path):
    output, port = tmp_path / "output", free_port()
    rows_file = output / "metrics.jsonl"
    slow_site = {"max-seconds": 1e-3, "state-folder": str(tmp_path / "states"), "device": "cpu"}

    def rows():
        lines = rows_file.read_text().splitlines() if rows_file.exists() else []
        return [json.loads(line) for line in lines]

    federation.start_superlink()
    federation.start_site(0, SITES)
    federation.start_site(1, SITES, **slow_site)
    run = federation.run(
        {
            **RUN_CONFIG,
            "num-server-rounds": ROUNDS,
            "global-batch-size": SITES * BATCH,
            "output-dir": str(output),
            "min-sites": 1,
            "round-timeout": 45,
            "strategy.weighting": "examples",
            "metrics.port": port,
        }
    )

    def after(number):
        wait_for(lambda: len(rows()) > number or run.poll() is not None, 240, f"round {number}")
        assert run.poll() is None, federation.log("run")

    after(1)
    assert federation.signal("site-0", signal.SIGKILL) >= 1
    # A round's line is written before its numbers are shown.
    wait_for(lambda: get(port)["isoloco_round"] == len(rows()) - 1, 60, "the numbers of round 1")
    numbers = get(port)
    done = rows()
    federation.start_site(0, SITES)
    assert numbers["isoloco_round"] == len(done) - 1
    for key in ("replies_used", "replies_rejected", "bytes_up", "bytes_down", "tokens"):
        column = key.replace("_", "-")
        expected = done[-1][column] if key == "tokens" else sum(row[column] for row in done)
        assert numbers[f"isoloco_{key}_total"] == expected
    assert numbers["isoloco_train_loss"] == pytest.approx(done[-1]["train-loss"])
    assert numbers["isoloco_seconds"] == pytest.approx(done[-1]["seconds"])
    run.wait(timeout=240)

    log = federation.log("run")
    assert [row["round"] for row in rows()] == [0, 1, 2, 3], log
    assert "Site 0 is back as node" in log
    steps, weights = [STEPS, 1], [STEPS * BATCH, BATCH]
    for row in rows()[1:]:
        start, end = (checkpoint(output, number) for number in (row["round"] - 1, row["round"]))
        answers = [
            answer(
                start,
                server_round=row["round"],
                place=place,
                places=SITES,
                rounds=ROUNDS,
                steps=steps[place],
            )
            for place in range(SITES)
        ]
        used = whose_mean(answers, weights, vector(end))
        assert len(used) == row["replies-used"]
        assert row["inner-steps"] == sum(steps[place] for place in used)
    saved = load_file(output / "model" / "model.safetensors")
    assert torch.equal(vector(saved), vector(end))
    assert vector(saved).isfinite().all()
    assert "of 2 workers are ready on cpu, 1 threads" in log
