"""States that runs have left are listed and removed by a command."""

import pytest
from typer.testing import CliRunner

from isoloco_flwr.pretraining.states import app, list_states, states_folder


@pytest.fixture(autouse=True)
def left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOLOCO_CACHE", str(tmp_path))
    for run, rounds in (("aaaa", (3, 4)), ("bbbb", (12,))):
        for worker in range(2):
            folder = states_folder() / run / f"worker-{worker:04d}"
            folder.mkdir(parents=True)
            for number in rounds:
                (folder / f"round-{number:06d}.safetensors").write_bytes(b"x" * 1000)


def call(*arguments):
    return CliRunner().invoke(app, arguments)


def test_the_list_says_what_each_run_has():
    runs = {run.folder.name: run for run in list_states()}
    assert (runs["aaaa"].workers, runs["aaaa"].newest_round, runs["aaaa"].num_bytes) == (2, 4, 4000)
    shown = call("list")
    assert shown.exit_code == 0
    assert all(word in shown.output for word in ("aaaa", "bbbb", "4.0 kB", "12"))


def test_only_the_named_run_is_removed():
    assert call("remove", "aaaa").exit_code == 0
    assert [run.folder.name for run in list_states()] == ["bbbb"]


def test_all_are_removed_only_when_asked_for():
    assert call("remove").exit_code != 0
    assert len(list_states()) == 2
    assert call("remove", "--all").exit_code == 0
    assert list_states() == []


@pytest.mark.parametrize("key", ["cccc", "../tokens", ""])
def test_a_key_that_is_not_there_removes_nothing(key):
    assert call("remove", "aaaa", key).exit_code != 0
    assert len(list_states()) == 2


def test_a_site_s_own_folder_is_looked_at_and_nothing_else_in_it(tmp_path):
    own = tmp_path / "own"
    (own / "cccc" / "worker-0001").mkdir(parents=True)
    (own / "cccc" / "worker-0001" / "round-000001.safetensors").write_bytes(b"x")
    (own / "photographs").mkdir()
    assert [run.folder.name for run in list_states(own)] == ["cccc"]
    assert call("remove", "--all", "--folder", str(own)).exit_code == 0
    assert sorted(path.name for path in own.iterdir()) == ["photographs"]
    assert len(list_states()) == 2
