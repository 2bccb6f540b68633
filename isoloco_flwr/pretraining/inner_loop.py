"""H inner steps of one worker."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from isoloco_flwr.pretraining.execution import flush_subnormals, resolve_precision
from isoloco_flwr.pretraining.loss import next_token_loss
from isoloco_flwr.pretraining.schedule import WARMUP_FRACTION, learning_rate_factor

__all__ = ["InnerReport", "run_inner_steps"]

CLIP_NORM = 1.0
"""Largest norm of a gradient, over all parameters (arXiv 2607.03011)."""


@dataclass(frozen=True)
class InnerReport:
    """What a round of inner steps saw."""

    mean_loss: float
    """Training loss in nats per token, mean over the steps that were taken."""
    last_loss: float
    """Training loss of the last step that was taken, in nats per token."""
    mean_gradient_norm: float
    """Norm of the gradient over all parameters before clipping, mean over the steps taken."""
    tokens: int
    """Tokens read, those of skipped steps included."""
    steps: int
    """Inner steps that were done, those skipped included: H, or fewer where time ran out."""
    skipped_steps: int
    """Steps that were left out since their loss or gradient was not finite."""
    seconds: float
    """Wall-clock time of the steps."""


@flush_subnormals()
def run_inner_steps(
    model: PreTrainedModel,
    optimizer: Optimizer,
    batches: Callable[[int], Tensor],
    *,
    first_step: int,
    steps: int,
    total_steps: int,
    clip_norm: float = CLIP_NORM,
    schedule: str = "cosine",
    warmup_fraction: float = WARMUP_FRACTION,
    micro_batch_size: int = 0,
    precision: str = "fp32",
    max_skipped_steps: int = 10,
    max_seconds: float = math.inf,
) -> InnerReport:
    """Train a model for one round.

    Parameters
    ----------
    model : PreTrainedModel
        Changed in place.
    optimizer : Optimizer
        The worker's own, with the state it had after its last round. `peak_lr` of each of its
        groups is the rate that the schedule scales.
    batches : Callable[[int], Tensor]
        Batch of an inner step, see `next_token_loss`.
    first_step : int
        The round's first inner step, counted from 0 over the whole run.
    steps : int
        H.
    total_steps : int
        Inner steps of the whole run, over which the learning rate is scheduled.
    clip_norm : float
        Largest norm of a gradient.
    schedule, warmup_fraction
        See `learning_rate_factor`.
    micro_batch_size : int
        Sequences whose gradients are taken at once and accumulated; the last part of a batch may
        have fewer. 0 takes the whole batch.
    precision : {"fp32", "bf16", "auto"}
        See `resolve_precision`. Parameters, gradients and the optimizer's state are float32 with
        bf16 as well.
    max_skipped_steps : int
        A step whose loss or gradient is not finite is skipped: neither the model nor the optimizer
        changes. So many in a row are an error.
    max_seconds : float
        Wall-clock time: after the first, a step is begun only if it ends in time at the mean pace
        of those before it. The learning rate is scheduled over H steps a round all the same.

    Raises
    ------
    FloatingPointError
        If `max_skipped_steps` steps in a row, or all steps of the round, were skipped. The model
        and the optimizer are as they were before those steps.

    Notes
    -----
    Meanwhile `flush_subnormals` is in force in this thread.

    The host waits for a GPU once a step, to decide whether the step is taken. By then the next
    batch is read and all work up to the clipped gradient is queued, so that the GPU waits for no
    more than the launch of the optimizer.
    """
    device = next(model.parameters()).device
    in_bf16 = resolve_precision(precision, device) == "bf16"
    model.train()
    started = time.perf_counter()
    losses: list[float] = []
    norms: list[float] = []
    tokens = skipped_in_a_row = done = 0
    batch = batches(first_step).to(device)
    for step in range(first_step, first_step + steps):
        if done and (time.perf_counter() - started) * (done + 1) / done > max_seconds:
            break
        factor = learning_rate_factor(
            step, total_steps, schedule=schedule, warmup_fraction=warmup_fraction
        )
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.zero_grad(set_to_none=True)
        loss = _backward(model, batch, micro_batch_size or len(batch), in_bf16)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        tokens += batch[:, 1:].numel()
        done += 1
        if step + 1 < first_step + steps:
            batch = batches(step + 1).to(device)
        loss_value, norm_value = torch.stack((loss, norm)).tolist()
        if math.isfinite(loss_value) and math.isfinite(norm_value):
            optimizer.step()
            losses.append(loss_value)
            norms.append(norm_value)
            skipped_in_a_row = 0
            continue
        skipped_in_a_row += 1
        what, value = (
            ("gradient", norm_value) if math.isfinite(loss_value) else ("training loss", loss_value)
        )
        problem = f"the {what} of inner step {step} is {value}"
        if skipped_in_a_row == min(max_skipped_steps, steps):
            break
    if skipped_in_a_row and skipped_in_a_row in (max_skipped_steps, done):
        raise FloatingPointError(f"{problem}: {skipped_in_a_row} steps in a row had to be skipped")
    return InnerReport(
        mean_loss=sum(losses) / len(losses),
        last_loss=losses[-1],
        mean_gradient_norm=sum(norms) / len(norms),
        tokens=tokens,
        steps=done,
        skipped_steps=done - len(losses),
        seconds=time.perf_counter() - started,
    )


def _backward(model: PreTrainedModel, batch: Tensor, size: int, in_bf16: bool) -> Tensor:
    """Add the gradients of the mean loss of a batch to the parameters; return the loss."""
    total = torch.zeros((), device=batch.device)
    for part in torch.split(batch, size):
        with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=in_bf16):
            loss = next_token_loss(model, part)
        if len(part) < len(batch):  # all sequences have equally many tokens
            loss = loss * (len(part) / len(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total
