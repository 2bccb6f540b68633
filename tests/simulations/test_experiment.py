"""Experiments: FLOP-matched by construction, tuned before they are compared."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from isoloco_flwr.settings import parse_settings
from simulations.experiment import (
    ROOT,
    ExperimentError,
    app_config,
    experiment_names,
    final_runs,
    load_experiment,
    rounds_of_budget,
    tuning_runs,
    worker_batch_size,
)

EXPERIMENT = """
title = "A title"
question = "A question?"
report = {x = "workers", lines = "method"}

[config]
"inner.steps" = 5
"global-batch-size" = 8

[axes.method.data-parallel]
data-parallel = true
only.workers = [1]
grid."inner.lr" = [1e-3, 2e-3]

[axes.method.plain]
"strategy.name" = "local-sgd"

[axes.method.diloco]
"strategy.name" = "diloco"
grid."strategy.outer-lr" = [0.5, 0.7]
grid."inner.lr" = [1e-3, 2e-3]

[axes]
workers = [1, 2, 4]
seed = [0, 1]

[scales.laptop]
budget-tokens = 51_200
tune = {seed = 0, workers = 4}
"""


@pytest.fixture
def write(tmp_path):
    def write_experiment(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return str(path)

    return write_experiment


sizes = {
    "steps": st.integers(1, 500),
    "global_batch_size": st.integers(1, 512),
    "context": st.sampled_from([64, 128, 512, 2048]),
}


@given(rounds=st.integers(1, 1000), **sizes)
def test_the_rounds_spend_the_budget_exactly(rounds, steps, global_batch_size, context):
    budget = rounds * steps * global_batch_size * context
    shape = {"steps": steps, "global_batch_size": global_batch_size, "context": context}
    assert rounds_of_budget(budget, **shape) == rounds


@given(budget=st.integers(1, 10**8), **sizes)
def test_a_budget_that_does_not_divide_is_refused_with_the_nearest_that_does(
    budget, steps, global_batch_size, context
):
    tokens = steps * global_batch_size * context
    assume(budget % tokens)
    shape = {"steps": steps, "global_batch_size": global_batch_size, "context": context}
    with pytest.raises(ExperimentError, match=f"budget-tokens = {budget}") as error:
        rounds_of_budget(budget, **shape)
    nearest = int(str(error.value).rsplit(" ", 1)[1])
    assert rounds_of_budget(nearest, **shape) >= 1
    others = [budget // tokens * tokens, (budget // tokens + 1) * tokens]
    assert abs(nearest - budget) == min(abs(n - budget) for n in others if n)


@given(global_batch_size=st.integers(1, 600), workers=st.integers(-3, 700))
def test_the_workers_batches_add_up_or_the_nearest_number_is_named(global_batch_size, workers):
    divides = workers > 0 and global_batch_size % workers == 0
    if divides:
        assert worker_batch_size(global_batch_size, workers) * workers == global_batch_size
        return
    with pytest.raises(ExperimentError, match=f"workers = {workers}:") as error:
        worker_batch_size(global_batch_size, workers)
    nearest = int(str(error.value).rsplit(" ", 1)[1])
    worker_batch_size(global_batch_size, nearest)
    for other in range(workers, workers + abs(nearest - workers)):
        assert other < 1 or global_batch_size % other


@pytest.mark.parametrize("name", experiment_names())
def test_every_run_of_an_experiment_trains_on_the_same_tokens(name):
    from isoloco_flwr.pretraining.model import MODEL_PRESETS

    experiment = load_experiment(name)
    assert "laptop" in experiment.scales
    for scale in experiment.scales.values():
        tuning = tuning_runs(scale)
        runs, untuned = final_runs(scale, {run.name: 1.0 for run in tuning})
        assert not untuned
        assert len({run.name for run in runs}) == len(runs)
        assert any(run.data_parallel for run in runs)
        for run in [*tuning, *runs]:
            settings = parse_settings(app_config() | run.config)
            batch = settings.worker_batch_size(run.workers) * run.workers
            context = MODEL_PRESETS[settings.model.preset].context
            assert settings.total_inner_steps * batch * context == scale.budget_tokens
            assert settings.global_batch_size == batch
        assert experiment.report.x in scale.axes
        assert experiment.report.lines in scale.axes


def test_the_six_questions_have_a_laptop_and_a_paper_scale():
    names = set(experiment_names()) - {"quick"}
    assert len(names) == 6
    for name in names:
        assert set(load_experiment(name).scales) == {"laptop", "paper"}


def test_grids_are_tried_at_the_values_of_tune_and_the_best_is_taken(write):
    scale = load_experiment(write(EXPERIMENT)).scales["laptop"]
    tuning = tuning_runs(scale)
    assert {(run.point["method"], run.workers, run.point["seed"]) for run in tuning} == {
        ("diloco", 4, "0"),
        ("data-parallel", 1, "0"),  # does not go together with four workers
    }
    assert len(tuning) == 4 + 2
    losses = {run.name: 2.0 for run in tuning}
    best = {"strategy.outer-lr": 0.7, "inner.lr": 1e-3}
    losses[next(run.name for run in tuning if run.grid == best)] = 1.0
    runs, untuned = final_runs(scale, losses)
    assert untuned == []
    assert len(runs) == 2 * (1 + 3 + 3)
    for run in runs:
        if run.point["method"] == "diloco":
            assert run.grid == best
            assert run.config["inner.lr"] == 1e-3
    # The tuning run at the winning values is one of the final runs, not another.
    assert {run.name for run in tuning if run.grid == best} <= {run.name for run in runs}


def test_without_its_tuning_a_method_has_no_final_runs(write):
    scale = load_experiment(write(EXPERIMENT)).scales["laptop"]
    missing, *rest = [run for run in tuning_runs(scale) if run.point["method"] == "diloco"]
    losses = {run.name: 1.0 for run in rest}
    losses |= {run.name: 1.0 for run in tuning_runs(scale) if run.data_parallel}
    runs, untuned = final_runs(scale, losses)
    assert untuned == [missing.name]
    assert {run.point["method"] for run in runs} == {"data-parallel", "plain"}


def test_a_loss_that_is_not_a_number_does_not_win(write):
    scale = load_experiment(write(EXPERIMENT)).scales["laptop"]
    losses = {run.name: float("nan") for run in tuning_runs(scale)}
    good = list(losses)[-1]
    losses[good] = 3.0
    runs, _ = final_runs(scale, losses)
    assert good in {run.name for run in runs}


def test_an_axis_not_named_in_tune_is_tuned_at_each_of_its_values(write):
    text = EXPERIMENT.replace("tune = {seed = 0, workers = 4}", "tune = {seed = 0}")
    scale = load_experiment(write(text)).scales["laptop"]
    tuning = tuning_runs(scale)
    assert len([run for run in tuning if run.point["method"] == "diloco"]) == 3 * 4
    losses = {
        run.name: abs(run.config.get("strategy.outer-lr", 0) - (0.7 if run.workers == 2 else 0.5))
        for run in tuning
    }
    runs, _ = final_runs(scale, losses)
    chosen = {
        run.workers: run.grid["strategy.outer-lr"]
        for run in runs
        if run.point["method"] == "diloco"
    }
    assert chosen == {1: 0.5, 2: 0.7, 4: 0.5}


def test_a_learning_rate_grid_is_an_axis_like_another(write):
    text = EXPERIMENT.split("[axes.method.data-parallel]")[0] + (
        '[axes]\n"inner.lr" = [1e-3, 2e-3]\nworkers = [2]\n[scales.laptop]\nbudget-tokens = 51_200'
    )
    scale = load_experiment(write(text)).scales["laptop"]
    runs, _ = final_runs(scale, {})
    assert [run.name for run in runs] == ["inner.lr-0.001_workers-2", "inner.lr-0.002_workers-2"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"strategy.name" = "diloco"', '"strategy.nam" = "diloco"', "strategy.nam"),
        ('"strategy.name" = "diloco"', '"strategy.name" = "delico"', "'delico': allowed is one of"),
        ("budget-tokens = 51_200", "budget-tokens = 51_201", "nearest that they divide is 51200"),
        ("budget-tokens = 51_200", "", "key budget-tokens is missing"),
        ("budget-tokens = 51_200", 'budget-tokens = "many"', "budget-tokens = 'many': wrong type"),
        ("budget-tokens = 51_200", "budget-tokens = 51_200\nspeed = 1", "unknown key speed"),
        ("workers = [1, 2, 4]", "workers = [1, 3, 4]", "workers = 3: .* nearest .* is 2"),
        ("workers = 4}", "workers = 5}", "workers = 5, allowed is one of 1, 2, 4"),
        ("workers = 4}", "wokers = 4}", "axis 'wokers', allowed is one of"),
        ("only.workers = [1]", "only.workers = [2]", "workers = 2: a data-parallel run has 1"),
        ("tune = {seed = 0, workers = 4}", "", "there are grids, but no tune"),
        ('question = "A question?"', "", "key question is missing"),
        ('"inner.steps" = 5', '"inner.steps" = 5\nresume = true', "resume = True: follows from"),
        ("[0.5, 0.7]", "[]", "lists that are not empty"),
        ("[config]", "[config", "mine.toml"),
    ],
)
def test_a_bad_experiment_is_refused_in_one_line(write, old, new, message):
    assert old in EXPERIMENT
    with pytest.raises(ExperimentError, match=message) as error:
        load_experiment(write(EXPERIMENT.replace(old, new)))
    assert "\n" not in str(error.value)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ExperimentError, match=r"'nonsense': allowed is one of .*quick.*workers"):
        load_experiment("nonsense")


def test_the_experiment_in_the_docs_is_one(write):
    text = (ROOT / "docs" / "simulations.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    scale = load_experiment(write(block)).scales["laptop"]
    assert [run.grid["strategy.outer-lr"] for run in tuning_runs(scale)] == [0.5, 0.7]
    names = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert set(experiment_names()) <= names
