"""Which runs of an experiment are over: those of its folder, and results from elsewhere."""

import dataclasses
import json
import subprocess

import pytest
from flwr.common.config import parse_config_args
from made_up import EXPERIMENT, loss_of, outcome, rows_of

from simulations.experiment import Run, Scale, load_experiment, tuning_runs
from simulations.outcome import write_results
from simulations.runs import Resources, Runs, SweepError, describe, outcomes_of_others, shares

RESOURCES = Resources(jobs=1, cpus_per_client=1, gpus_per_client=0.0, threads=1)


@pytest.fixture
def scale(tmp_path) -> Scale:
    path = tmp_path / "merges.toml"
    path.write_text(EXPERIMENT)
    return load_experiment(str(path)).scales["laptop"]


@pytest.fixture
def tuning(scale) -> list[Run]:
    return tuning_runs(scale)


@pytest.fixture
def results(tmp_path, tuning):
    """Write the results of all tuning, as another machine has brought them."""
    path = tmp_path / "results.jsonl"
    write_results(path, map(outcome, tuning))
    return path


def finish_here(folder, run: Run, seconds: float = 15.0) -> None:
    own = folder / run.name
    own.mkdir(parents=True)
    (own / "run.json").write_text(json.dumps(describe(run, folder, RESOURCES)))
    config = {"run-config": {"inner.steps": 5}, "num-parameters": 7, "versions": {}}
    (own / "config.json").write_text(json.dumps(config))
    rows = rows_of(run)
    (own / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    end = {"eval-loss": rows[-1]["eval-loss"], "seconds": seconds}
    (own / "finished.json").write_text(json.dumps(end))


def test_results_from_elsewhere_count_as_finished(tmp_path, scale, tuning, results):
    runs = Runs(tmp_path / "here", results)
    known, untuned = runs.plan(scale)
    assert not untuned
    finished = [run.name for run in known if runs.is_finished(run)]
    assert finished == [run.name for run in tuning]
    # What follows from them is planned with the rates that did best there.
    diloco = [run for run in known if run.point == {**tuning[0].point, "seed": "1"}]
    assert [run.grid for run in diloco] == [{"strategy.outer-lr": 0.7}]
    assert [runs.outcome(run).loss for run in tuning] == [loss_of(run) for run in tuning]


def test_without_results_nothing_is_finished(tmp_path, scale, tuning):
    for runs in (Runs(tmp_path / "here"), Runs(tmp_path / "here", tmp_path / "none.jsonl")):
        known, untuned = runs.plan(scale)
        assert untuned == [run.name for run in tuning]
        assert not any(map(runs.is_finished, known))


def test_runs_of_both_places_are_merged_and_the_folders_own_come_first(tmp_path, tuning, results):
    folder = tmp_path / "here"
    finish_here(folder, tuning[0])
    runs = Runs(folder, results)
    assert all(map(runs.is_finished, tuning))
    assert [run for run in tuning if runs.is_finished_here(run)] == tuning[:1]
    assert [runs.outcome(run).num_parameters for run in tuning[:2]] == [7, 1000]


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"inner.lr": 9e-3}, False),
        ({"strategy.diagnostics": "*q_proj*"}, True),
        ({"checkpoint.every": 7}, True),
    ],
)
def test_a_result_counts_where_the_same_settings_have_decided_it(
    tmp_path, tuning, results, change, counts
):
    runs = Runs(tmp_path / "here", results)
    changed = dataclasses.replace(tuning[0], config={**tuning[0].config, **change})
    assert runs.is_finished(changed) is counts
    assert runs.is_brought_otherwise(changed) is not counts


def test_a_run_of_another_experiment_counts_under_its_name_here(tmp_path, tuning):
    run = tuning[0]
    finish_here(tmp_path / "other", dataclasses.replace(run, name="theirs"))
    others = outcomes_of_others(tmp_path / "here")
    runs = Runs(tmp_path / "here", others=others)
    assert [other for other in tuning if runs.is_finished(other)] == [run]
    found = runs.outcome(run)
    assert (found.run, found.point, found.loss) == (run.name, run.point, loss_of(run))
    # Its own folder is not another experiment's.
    assert "theirs" not in {outcome.run for outcome in outcomes_of_others(tmp_path / "other")}


@pytest.mark.parametrize(
    ("data_parallel", "said", "counts"),
    [
        (False, {"strategy.outer-lr": 0.7}, True),  # DiLoCo's own rate
        (False, {"strategy.outer-lr": 0.5}, False),
        (False, {"inner.optimizer": "adamw"}, True),  # the app's default
        (True, {"strategy.outer-lr": 0.5}, True),  # it has no outer step
    ],
)
def test_a_setting_left_out_is_its_default(tmp_path, tuning, data_parallel, said, counts):
    run = dataclasses.replace(tuning[0], data_parallel=data_parallel)
    silent = {key: value for key, value in run.config.items() if key not in said}
    other = outcome(dataclasses.replace(run, config=silent))
    spoken = dataclasses.replace(run, config={**silent, **said})
    assert Runs(tmp_path / "here", others=[other]).is_finished(spoken) is counts


def test_a_run_in_the_folder_that_something_else_decided_is_refused(tmp_path, tuning):
    finish_here(tmp_path, tuning[0])
    changed = dataclasses.replace(tuning[0], config={**tuning[0].config, "inner.lr": 9e-3})
    with pytest.raises(SweepError, match=r"inner\.lr"):
        Runs(tmp_path).is_finished(changed)


def test_a_file_that_holds_no_results_is_refused_by_name(tmp_path):
    path = tmp_path / "results.jsonl"
    for content in ("no json\n", '{"run": "a"}\n', "[1]\n"):
        path.write_text(content)
        with pytest.raises(SweepError, match=r"results\.jsonl: allowed is"):
            Runs(tmp_path, path)


@pytest.mark.parametrize("file", ["run.json", "config.json", "metrics.jsonl"])
def test_a_finished_run_with_a_broken_file_is_refused_by_name(tmp_path, tuning, file):
    run = tuning[0]
    finish_here(tmp_path / "other", run)
    for break_it in (lambda path: path.write_text('{"cut'), lambda path: path.unlink()):
        break_it(tmp_path / "other" / run.name / file)
        with pytest.raises(SweepError, match=rf"{run.name}: allowed is.*move that folder away"):
            outcomes_of_others(tmp_path / "here")


@pytest.mark.parametrize("content", ['{"cut', "[1]", "{}", "null"])
def test_a_run_whose_decisions_cannot_be_read_is_refused_by_name(tmp_path, tuning, content):
    run = tuning[0]
    finish_here(tmp_path, run)
    (tmp_path / run.name / "run.json").write_text(content)
    with pytest.raises(SweepError, match=rf"{run.name}: allowed is.*move that folder away"):
        Runs(tmp_path).is_finished(run)


def test_the_expected_time_follows_from_the_folders_own_runs(tmp_path, tuning, results):
    two, four = [[run for run in tuning if run.workers == workers] for workers in (2, 4)]
    assert Runs(tmp_path / "here", results).expected_seconds(tuning, jobs=1) is None
    finish_here(tmp_path / "here", two[0], seconds=100.0)
    finish_here(tmp_path / "here", four[0], seconds=200.0)
    here = Runs(tmp_path / "here")
    # Each of the other two takes as long as the one of as many workers, and 20 s to start.
    assert here.expected_seconds(tuning, jobs=1) == 100 + 200 + 2 * 20
    assert here.expected_seconds(tuning, jobs=2) == 170
    # Half of the rounds are done: half of the time is left.
    (tmp_path / "here" / four[1].name).mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows_of(four[1])[:3])
    (tmp_path / "here" / four[1].name / "metrics.jsonl").write_text(lines)
    assert here.expected_seconds(tuning, jobs=1) == 100 + 100 + 2 * 20
    # What has been brought need not be done.
    both = Runs(tmp_path / "here", results)
    assert both.expected_seconds(tuning, jobs=1) == 0


def test_the_line_that_does_a_run_by_itself_says_what_decides_it(tmp_path, scale, results):
    folder = tmp_path / "merges"
    known, _ = Runs(folder, results).plan(scale)
    assert {run.data_parallel for run in known} == {True, False}
    for run in known:
        command = describe(run, folder, RESOURCES)["command"]
        said = subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {command}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        *words, run_config = said.stdout.rstrip("\0").split("\0")
        config = dict(parse_config_args([run_config]))
        own = f"runs/merges/{run.name}"
        if run.data_parallel:
            assert words == ["python", "-m", "simulations.data_parallel", own]
        else:
            assert words[:3] == ["flwr", "run", "."]
            assert f"num-supernodes={run.workers} " in words[words.index("--federation-config") + 1]
            assert config.pop("output-dir") == f"{tmp_path}/{own}"
            assert config.pop("resume") is False
        assert config == run.config


@pytest.mark.parametrize(
    ("count", "jobs", "cpus", "threads", "expected"),
    [
        (5, 2, 2, 1, [2, 2, 2, 2, 1]),
        (4, 2, 2, 1, [2, 2, 2, 2]),
        (1, 2, 2, 1, [1]),
        (3, 1, 2, 1, [2, 2, 2]),
        (4, 3, 6, 1, [6, 6, 6, 2]),
        (3, 2, 2, 2, [2, 2, 2]),  # never less than the threads that are at work
        (3, 2, 1, 2, [1, 1, 1]),
        (0, 2, 2, 1, []),
    ],
)
def test_the_run_left_for_the_end_has_more_clients_at_a_time(count, jobs, cpus, threads, expected):
    resources = Resources(jobs=jobs, cpus_per_client=cpus, gpus_per_client=0.5, threads=threads)
    shared = shares(resources, count)
    assert [share.cpus_per_client for share in shared] == expected
    for share in shared:
        assert dataclasses.replace(share, cpus_per_client=cpus) == resources
