"""The ClientApp as an actor runs it: one process, many virtual workers, nothing passed between."""

import multiprocessing
import os
import tomllib
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.config import flatten_dict
from flwr.supercore.task_identity import TaskIdentity

from isoloco_flwr.pretraining.model import build_model, model_tensors

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
DEFAULTS = flatten_dict(tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"])
WORKERS = 3
CONFIG = {
    **DEFAULTS,
    "num-server-rounds": 2,
    "inner.steps": 2,
    "global-batch-size": 2 * WORKERS,
}


def context(worker, config, workers=WORKERS, **node):
    place = {"partition-id": worker, "num-partitions": workers}
    return Context(
        run_id=1,
        node_id=worker,
        node_config={**place, **node},
        state=RecordDict(),
        run_config={**CONFIG, **config},
    )


def ask(kind, worker, config, content=None, **node):
    """Hand one message to the app in this process, as an actor does."""
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    torch.set_num_threads(1)
    from clients.client_app import app

    message = Message(content or RecordDict(), dst_node_id=worker, message_type=kind)
    message.metadata.__dict__["_message_id"] = "message"
    return app(message, context(worker, config, **node)).content


def train(worker, server_round, config, run_key, **node):
    """Train one worker for one round from weights that depend on the round alone."""
    model = build_model("demo", vocabulary_size=257, seed=server_round)
    content = RecordDict(
        {
            "arrays": ArrayRecord(dict(model_tensors(model))),
            "config": ConfigRecord({"server-round": server_round, "run-key": run_key}),
        }
    )
    answer = ask(MessageType.TRAIN, worker, config, content, **node)
    return dict(answer["arrays"].to_torch_state_dict()), dict(answer["metrics"])


def train_both_rounds(worker, config, run_key, answers):
    for server_round in (1, 2):
        arrays, _ = train(worker, server_round, config, run_key)
        answers.put((worker, server_round, {name: v.numpy() for name, v in arrays.items()}))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOLOCO_CACHE", os.environ.get("ISOLOCO_CACHE", str(tmp_path / "cache")))


@pytest.mark.parametrize("config", [{}, {"inner.optimizer": "muon"}], ids=["adamw", "muon"])
def test_workers_in_any_order_on_one_actor_are_as_each_in_its_own_process(config):
    alone = {}
    spawn = multiprocessing.get_context("spawn")
    for worker in range(WORKERS):
        answers = spawn.Queue()
        process = spawn.Process(target=train_both_rounds, args=(worker, config, "alone", answers))
        process.start()
        for _ in (1, 2):
            number, server_round, arrays = answers.get(timeout=120)
            alone[number, server_round] = arrays
        process.join()
    for key, order in (("up", [0, 1, 2]), ("mixed", [2, 0, 1])):
        for server_round in (1, 2):
            for worker in order if server_round == 1 else reversed(order):
                arrays, metrics = train(worker, server_round, config, key)
                assert metrics["state-lost"] == 0
                for name, value in alone[worker, server_round].items():
                    assert torch.equal(arrays[name], torch.from_numpy(value)), (key, name)


def test_a_state_that_is_reset_is_neither_kept_nor_missed():
    config = {"inner.state": "reset"}
    _, first = train(0, 1, config, "reset")
    arrays, second = train(0, 2, config, "reset")
    assert (first["state-lost"], second["state-lost"]) == (0, 0)
    kept, _ = train(0, 1, {}, "kept")
    kept, _ = train(0, 2, {}, "kept")
    assert not torch.equal(arrays["lm_head.weight"], kept["lm_head.weight"])


def test_a_lost_state_is_counted():
    _, metrics = train(1, 2, {}, "never trained")
    assert metrics["state-lost"] == 1


def test_a_worker_tells_what_its_round_took():
    _, metrics = train(0, 1, {}, "metrics")
    assert metrics["num-examples"] == 4
    assert metrics["skipped-steps"] == 0
    assert 0 < metrics["epochs"] < 0.01
    for part in ("load-seconds", "train-seconds", "save-seconds"):
        assert metrics[part] > 0


def test_the_answer_before_the_first_round_says_what_the_states_take():
    keep = ask(MessageType.QUERY, 1, {"checkpoint.every": 3})["worker"]
    parameters = build_model("demo", vocabulary_size=257, seed=0).num_parameters()
    assert (keep["partition-id"], keep["num-partitions"]) == (1, WORKERS)
    assert keep["state-bytes"] == 4 * 2 * 4 * parameters
    assert keep["free-bytes"] > 0
    assert ask(MessageType.QUERY, 1, {"inner.state": "reset"})["worker"]["state-bytes"] == 0
    assert (keep["device"], keep["threads"]) == ("cpu", 1)
    other = ask(MessageType.QUERY, 0, {})["worker"]
    assert other["disk"] == keep["disk"]


@pytest.mark.parametrize(
    ("config", "node", "named"),
    [
        ({}, {"partition-id": 7}, "partition-id = 7: allowed is 0 <= partition-id < 3"),
        ({"data.partitioner": "natural"}, {}, "data-source = ''"),
        (
            {},
            {"device": "cuda:7"},
            "device = 'cuda:7': this process sees 0 GPUs, allowed is auto, cpu",
        ),
        ({}, {"state-folder": "/dev/null/states"}, "state-folder = '/dev/null/states'"),
        ({"model.preset": "5M"}, {}, "model.preset = '5M': allowed is one of demo, 3M"),
        ({"model.path": "/not/there"}, {}, "model.path"),
        ({"data.source": "/not/there"}, {}, "data.source = '/not/there'"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_round(config, node, named):
    with pytest.raises(Exception, match=named):
        ask(MessageType.QUERY, 0, config, **node)


def moved(arrays, server_round):
    """Return how far a worker's parameters are from those that `train` sends."""
    start = dict(model_tensors(build_model("demo", vocabulary_size=257, seed=server_round)))
    return {name: arrays[name] - value for name, value in start.items()}


def test_a_site_without_time_takes_one_step_and_says_so():
    arrays, metrics = train(0, 1, {}, "slow", **{"max-seconds": 1e-6})
    expected, _ = train(0, 1, {"num-server-rounds": 4, "inner.steps": 1}, "one step")
    assert (metrics["inner-steps"], metrics["num-examples"]) == (1, 2)
    assert all(torch.equal(arrays[name], value) for name, value in expected.items())
    _, metrics = train(0, 1, {}, "quick", **{"max-seconds": 3600})
    assert (metrics["inner-steps"], metrics["num-examples"]) == (2, 4)


def test_a_site_keeps_its_states_in_its_own_folder(tmp_path):
    folder = tmp_path / "mine"
    train(1, 1, {}, "own-folder", **{"state-folder": str(folder)})
    assert [path.name for path in folder.rglob("*.safetensors")] == ["round-000001.safetensors"]
    _, metrics = train(1, 2, {}, "own-folder", **{"state-folder": str(folder)})
    assert metrics["state-lost"] == 0


def test_a_run_key_that_leads_elsewhere_is_refused(tmp_path):
    with pytest.raises(ValueError, match="allowed is the name of a folder"):
        train(1, 1, {}, "../elsewhere", **{"state-folder": str(tmp_path / "mine")})
    assert not (tmp_path / "elsewhere").exists()


def test_a_site_s_cap_only_lowers_the_micro_batch():
    whole, _ = train(0, 1, {}, "whole")
    parts, _ = train(0, 1, {"inner.micro-batch-size": 1}, "parts")
    capped, _ = train(0, 1, {}, "capped", **{"max-batch-size": 1})
    beyond, _ = train(0, 1, {"inner.micro-batch-size": 1}, "beyond", **{"max-batch-size": 9})
    name = "lm_head.weight"
    assert torch.equal(capped[name], parts[name])
    assert torch.equal(beyond[name], parts[name])
    assert not torch.equal(capped[name], whole[name])


def test_a_state_of_an_older_round_is_used_aged_or_reset():
    """Round 4 after an absence in rounds 2 and 3, from one and the same state of round 1."""
    results = {}
    for rule in ("use", "age", "reset"):
        config = {"inner.stale-state": rule, "num-server-rounds": 4}
        train(0, 1, config, rule)
        results[rule], metrics = train(0, 4, config, rule)
        assert (metrics["state-lost"], metrics["rounds-missed"]) == (0, 2)
    afresh, metrics = train(0, 4, {"num-server-rounds": 4}, "nothing saved")
    assert (metrics["state-lost"], metrics["rounds-missed"]) == (1, 0)
    assert all(torch.equal(results["reset"][name], value) for name, value in afresh.items())
    steps = {
        rule: torch.cat([value.flatten() for value in moved(arrays, 4).values()])
        for rule, arrays in results.items()
    }
    # Aged moments make smaller steps than fresh ones, and other ones than those left as they were.
    assert steps["age"].norm() < 0.9 * steps["reset"].norm()
    assert not torch.equal(steps["age"], steps["use"])
