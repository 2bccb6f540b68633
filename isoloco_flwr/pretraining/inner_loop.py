"""H inner steps of one worker."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere
from torch.optim import Optimizer
from transformers import PreTrainedModel

from isoloco_flwr.pretraining.schedule import learning_rate_factor

__all__ = ["InnerReport", "build_inner_optimizer", "next_token_loss", "run_inner_steps"]

CLIP_NORM = 1.0
"""Largest norm of a gradient, over all parameters (arXiv 2607.03011)."""


@dataclass(frozen=True)
class InnerReport:
    """What a round of inner steps saw."""

    mean_loss: float
    """Training loss in nats per token, mean over the steps."""
    last_loss: float
    """Training loss of the last step in nats per token."""
    mean_gradient_norm: float
    """Norm of the gradient over all parameters before clipping, mean over the steps."""
    tokens: int
    """Tokens trained on."""


def build_inner_optimizer(name: str, parameters: Iterable[nn.Parameter], *, lr: float) -> Optimizer:
    """Make an inner optimizer.

    Parameters
    ----------
    name : {"adamw", "sgd"}
        "adamw" has betas 0.9 and 0.95 and weight decay 0.1 on all parameters
        (arXiv 2607.03011); "sgd" is plain.
    parameters : Iterable[nn.Parameter]
        What is trained.
    lr : float
        Peak learning rate.

    Raises
    ------
    ValueError
        If the name is unknown.
    """
    parameters = list(parameters)
    if name == "adamw":
        fused = all(parameter.is_cuda for parameter in parameters)
        return torch.optim.AdamW(
            parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused or None
        )
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr)
    raise ValueError(f"inner optimizer {name!r}: allowed is one of adamw, sgd")


def next_token_loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token in nats.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    batch : Tensor
        int64 of shape (sequences, context + 1): inputs and, one further, targets.
    """
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def run_inner_steps(
    model: PreTrainedModel,
    optimizer: Optimizer,
    batches: Callable[[int], Tensor],
    *,
    first_step: int,
    steps: int,
    total_steps: int,
    lr: float,
    clip_norm: float = CLIP_NORM,
) -> InnerReport:
    """Train a model for one round.

    Parameters
    ----------
    model : PreTrainedModel
        Changed in place.
    optimizer : Optimizer
        The worker's own, with the state it had after its last round.
    batches : Callable[[int], Tensor]
        Batch of an inner step, see `next_token_loss`.
    first_step : int
        The round's first inner step, counted from 0 over the whole run.
    steps : int
        H.
    total_steps : int
        Inner steps of the whole run, over which the learning rate is scheduled.
    lr : float
        Peak learning rate.
    clip_norm : float
        Largest norm of a gradient.

    Raises
    ------
    FloatingPointError
        If a loss or a gradient is not finite; neither model nor optimizer must be used then.
    """
    device = next(model.parameters()).device
    model.train()
    losses = []
    norms = []
    tokens = 0
    for step in range(first_step, first_step + steps):
        batch = batches(step).to(device)
        for group in optimizer.param_groups:
            group["lr"] = lr * learning_rate_factor(step, total_steps)
        loss = next_token_loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm))
        optimizer.step()
        losses.append(loss.detach())
        tokens += batch[:, 1:].numel()
    # Read once a round: reading a number waits for a GPU. The norms are checked too, since what the
    # last step does to the model shows in no loss.
    loss_values = torch.stack(losses).double().tolist()
    norm_values = torch.stack(norms).double().tolist()
    for step in range(steps):
        for what, value in (("training loss", loss_values[step]), ("gradient", norm_values[step])):
            if not math.isfinite(value):
                raise FloatingPointError(f"the {what} of inner step {first_step + step} is {value}")
    return InnerReport(
        mean_loss=sum(loss_values) / steps,
        last_loss=loss_values[-1],
        mean_gradient_norm=sum(norm_values) / steps,
        tokens=tokens,
    )
