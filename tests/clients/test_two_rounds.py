"""Two rounds of the real ClientApp under the real strategy, for all that an inner loop can be."""

import tomllib
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.common.config import flatten_dict
from flwr.supercore.task_identity import TaskIdentity
from rounds import LoopbackGrid, record, tensors

from isoloco_flwr import DiLoCo
from isoloco_flwr.pretraining.model import build_model, model_tensors

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
DEFAULTS = flatten_dict(tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"])
WORKERS, BATCH = 2, 4
CONFIG = {
    **DEFAULTS,
    "inner.steps": 4,
    "inner.schedule": "constant",
    "global-batch-size": WORKERS * BATCH,
    "model.context": 32,
}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOLOCO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class AppGrid(LoopbackGrid):
    """Hands every message to the ClientApp, in this process."""

    def __init__(self, run_config):
        super().__init__(WORKERS)
        self._run_config = run_config
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

    def pull_messages(self, message_ids):
        from clients.client_app import app

        replies = []
        for message_id in message_ids:
            message = self._waiting.pop(message_id)
            worker = message.metadata.dst_node_id - 101
            context = Context(
                run_id=1,
                node_id=worker,
                node_config={"partition-id": worker, "num-partitions": WORKERS},
                state=RecordDict(),
                run_config=self._run_config,
            )
            replies.append(app(message, context))
        return replies


def start():
    return dict(model_tensors(build_model("demo", vocabulary_size=257, seed=3)))


def run(request, num_rounds=2, **changes):
    """Train; return the global parameters, and each round's metrics."""
    config = {**CONFIG, "num-server-rounds": num_rounds}
    config |= {f"inner.{key}": value for key, value in changes.items()}
    metrics = []
    strategy = DiLoCo(fraction_evaluate=0.0, min_train_nodes=WORKERS, min_available_nodes=WORKERS)
    key = "-".join([request.node.name, *map(str, changes.values())])
    result = strategy.start(
        AppGrid(config),
        record(start()),
        num_rounds=num_rounds,
        train_config=ConfigRecord({"run-key": "".join(c if c.isalnum() else "-" for c in key)}),
        evaluate_fn=lambda *_: metrics.append(dict(strategy.train_metrics)),
    )
    for one in metrics[1:]:  # the first is before training
        assert (one["replies-used"], one["replies-rejected"]) == (WORKERS, 0)
    return tensors(result.arrays), metrics[1:]


def largest(one, other):
    return max((value - other[name]).abs().max().item() for name, value in one.items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_every_optimizer_with_every_state_batch_and_precision(request, optimizer):
    how = {"optimizer": optimizer, "lr": 0.1 if optimizer == "sgd" else 4e-3}
    kept, metrics = run(request, **how)
    assert metrics[1]["train-loss"] < metrics[0]["train-loss"] < 6
    moved = largest(kept, start())
    assert moved > 1e-3

    reset, _ = run(request, **how, state="reset")
    if optimizer == "sgd":  # has no moments
        assert largest(reset, kept) == 0
    else:
        assert largest(reset, kept) > 0.01 * moved

    # Accumulated gradients are the same to 1e-6; AdamW and Muon divide small ones by their size.
    parts, in_parts = run(request, **how, **{"micro-batch-size": 1})
    assert [one["train-loss"] for one in in_parts] == pytest.approx(
        [one["train-loss"] for one in metrics], rel=1e-5
    )
    assert largest(parts, kept) < (1e-6 if optimizer == "sgd" else 0.05 * moved)

    low, in_bf16 = run(request, **how, precision="bf16")
    assert largest(low, kept) > 1e-6
    assert [one["train-loss"] for one in in_bf16] == pytest.approx(
        [one["train-loss"] for one in metrics], rel=0.01
    )


@pytest.mark.parametrize(("bits", "tolerance"), [("fp32", 1e-6), ("fp16", 1e-3), ("bf16", 8e-3)])
def test_both_forms_of_a_reply_give_one_model_up_to_the_rounding(request, bits, tolerance):
    full, [metrics] = run(request, num_rounds=1)
    short, [in_short] = run(request, num_rounds=1, reply=f"pseudo-gradient-{bits}")
    before = start()
    for name, value in full.items():
        moved = (value - before[name]).abs().max()
        assert moved > 0
        # What was sent is rounded as well, in float32.
        allowed = tolerance * moved + 1e-6 * before[name].abs().max()
        assert (short[name] - value).abs().max() <= allowed, name
    share = in_short["bytes-up"] / metrics["bytes-up"]
    assert share == pytest.approx(1.0 if bits == "fp32" else 0.5, abs=0.01)
    assert in_short["bytes-down"] == metrics["bytes-down"]
