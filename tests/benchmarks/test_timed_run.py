"""The benchmark's copy of the app, and how it shares a round's seconds out."""

import tomllib
from dataclasses import astuple

import pytest

from benchmarks.pretraining import CPU
from benchmarks.timed_run import copy_app, round_parts


def test_the_copy_is_the_app_with_other_components(tmp_path):
    app = copy_app(tmp_path / "app")
    settings = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert settings["components"] == {
        "serverapp": "timed_app:server_app",
        "clientapp": "timed_app:client_app",
    }
    assert all(any(app.glob(pattern)) for pattern in settings["fab-include"])


def note(kind, start, end):
    return {"kind": kind, "start": start, "end": end, "round": 3}


def test_the_parts_of_a_round_add_up_to_it():
    workers = CPU.workers
    starts = [11.0 + 2 * worker for worker in range(workers)]
    notes = [
        note("send", 10.5, 10.6),
        *(note("train", start, start + 1.75) for start in starts),
        *(note("receive", start + 1.75, start + 1.875) for start in starts),
    ]
    row = {"round": 3, "seconds": 20.0, "replies-used": workers}
    row |= {"load-seconds": 0.25, "train-seconds": 1.0, "save-seconds": 0.5}
    parts = round_parts(CPU, row, notes)
    assert (parts.send, parts.load, parts.train, parts.save) == (0.5, 2.0, 8.0, 4.0)
    assert (parts.between, parts.reply) == (7 * 0.25, 0.125)
    total, *rest = astuple(parts)
    assert sum(rest) == pytest.approx(total) == pytest.approx(20.0)


def test_a_round_without_all_replies_is_not_measured():
    row = {"round": 3, "seconds": 1.0, "replies-used": 7}
    notes = [note("send", 0, 0), note("train", 0, 1), note("receive", 1, 1)]
    with pytest.raises(SystemExit, match="round 3 has 7 of 8 replies"):
        round_parts(CPU, row, notes)
