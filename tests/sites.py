"""What sites must have answered, computed again without Flower."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor

from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import build_model, load_tensors, model_tensors
from isoloco_flwr.pretraining.optimizers import build_inner_optimizer
from isoloco_flwr.pretraining.stream import WorkerStream
from isoloco_flwr.pretraining.tokens import load_tokens

CONTEXT, STEPS, BATCH, LR = 32, 3, 2, 0.5

RUN_CONFIG = {
    "inner.steps": STEPS,
    "inner.optimizer": "sgd",  # has no state: a reply depends on parameters, place and round only
    "inner.lr": LR,
    "inner.schedule": "constant",
    "inner.warmup-fraction": 0.0,
    "strategy.name": "local-sgd",
    "strategy.outer-lr": 1.0,
    "model.context": CONTEXT,
    "evaluation.every": 0,
    "evaluation.sequences": 4,
    "checkpoint.keep": 100,
}
"""Settings under which a round ends at the mean of the replies used."""


def checkpoint(folder, server_round) -> dict[str, Tensor]:
    """Return the parameters of the global model after a round, or before the first."""
    if server_round == 0:
        return dict(model_tensors(build_model("demo", vocabulary_size=257, seed=0)))
    return load_file(
        folder / "checkpoints" / f"round-{server_round:06d}" / "parameters.safetensors"
    )


def answer(
    start: Mapping[str, Tensor],
    *,
    server_round: int,
    place: int,
    places: int,
    rounds: int,
    steps: int = STEPS,
) -> Tensor:
    """Return the parameters a site ends a round with, in one vector."""
    model = build_model("demo", vocabulary_size=257, seed=0)
    load_tensors(model, dict(start))
    stream = WorkerStream(
        load_tokens("sotu").train, context=CONTEXT, seed=0, worker=place, num_workers=places
    )
    run_inner_steps(
        model,
        build_inner_optimizer("sgd", model, lr=LR),
        lambda step: stream.batch(step, BATCH),
        first_step=(server_round - 1) * STEPS,
        steps=steps,
        total_steps=rounds * STEPS,
        schedule="constant",
        warmup_fraction=0.0,
    )
    return vector(dict(model_tensors(model)))


def vector(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def whose_mean(answers: Sequence[Tensor], weights: Sequence[float], result: Tensor) -> set[int]:
    """Return the one set of sites whose weighted mean is a round's result.

    Fails where none is, as when a reply counts twice or stems from another round.
    """
    found = []
    for size in range(1, len(answers) + 1):
        for chosen in itertools.combinations(range(len(answers)), size):
            total = sum(weights[place] for place in chosen)
            mean = sum(answers[place] * (weights[place] / total) for place in chosen)
            if torch.allclose(mean, result, rtol=1e-4, atol=1e-6):
                found.append(set(chosen))
    assert len(found) == 1, f"the round is the mean of {found or 'no set of sites'}"
    return found[0]
