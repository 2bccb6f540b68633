"""The loss of the next token, without all logits in memory at once."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - its name everywhere
from transformers import PreTrainedModel

__all__ = ["LOGITS_AT_ONCE", "next_token_loss"]

LOGITS_AT_ONCE = 2**25
"""Most logits that are computed at a time: 128 MiB in float32, 1048 tokens of 32,000."""

_HEAD_ALONE: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a model's logits are its head on its last hidden states and nothing else."""


def next_token_loss(
    model: PreTrainedModel, batch: Tensor, *, logits_at_once: int = LOGITS_AT_ONCE
) -> Tensor:
    """Return the mean cross-entropy of the next token in nats.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    batch : Tensor
        int64 of shape (sequences, context + 1): inputs and, one further, targets.
    logits_at_once : int
        Where a batch has more logits than this, they are computed for some tokens at a time, both
        the loss and its gradient, and dropped. A model whose logits are not just a linear head on
        its last hidden states (scaled or capped ones, say) has them all at once all the same.
    """
    inputs, targets = batch[:, :-1], batch[:, 1:].flatten()
    head = model.get_output_embeddings()
    if (
        type(head) is nn.Linear
        and targets.numel() * head.out_features > logits_at_once
        and _head_is_all(model, head, inputs[:1, :2])
    ):
        hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        tokens = max(1, logits_at_once // head.out_features)
        return _chunked_cross_entropy(hidden.flatten(0, 1), head, targets, tokens)
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets)


def _head_is_all(model: PreTrainedModel, head: nn.Linear, inputs: Tensor) -> bool:
    """Try on two tokens whether the head on the last hidden states gives the model's logits."""
    if model not in _HEAD_ALONE:
        if model.base_model is model:
            _HEAD_ALONE[model] = False
            return False
        training = model.training
        model.eval()  # without dropout
        try:
            # A compiled model would be compiled for these two tokens.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
                logits = model(input_ids=inputs, use_cache=False).logits
                same = torch.equal(head(hidden).float(), logits.float())
        finally:
            model.train(training)
        if not logits.isfinite().all():  # these weights tell nothing about the model
            return False
        _HEAD_ALONE[model] = same
    return _HEAD_ALONE[model]


def _chunked_cross_entropy(hidden: Tensor, head: nn.Linear, targets: Tensor, tokens: int) -> Tensor:
    """Return the mean cross-entropy of logits that exist for some tokens at a time."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else head.weight.dtype
    arguments = hidden, head.weight, head.bias, targets, tokens, dtype
    with torch.autocast(device, enabled=False):
        if not torch.is_grad_enabled():
            return _cross_entropy((False, False, False), *arguments)[0]
        loss: Tensor = _ChunkedCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
        return loss


def _cross_entropy(
    needs: tuple[bool, bool, bool],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tokens: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the loss and the gradients that are needed of hidden states, weight and bias.

    Products are in `dtype`; the softmax and sums over the parts are in float32.
    """
    low, low_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    loss = torch.zeros((), device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if needs[0] else None
    grad_weight = torch.zeros_like(weight) if needs[1] else None
    grad_bias = None if bias is None or not needs[2] else torch.zeros_like(bias)
    for first in range(0, len(targets), tokens):
        part = slice(first, first + tokens)
        states, wanted = hidden[part].to(dtype), targets[part, None]
        logits = F.linear(states, low, low_bias).float()
        log_sums = logits.logsumexp(dim=1, keepdim=True)
        loss += (log_sums - logits.gather(1, wanted)).sum()
        if not any(needs):
            continue
        grad = logits.sub_(log_sums).exp_()  # the softmax, in the logits' memory
        grad.scatter_add_(1, wanted, torch.full_like(log_sums, -1.0))
        grad.div_(len(targets))
        if grad_bias is not None:
            grad_bias += grad.sum(dim=0)
        grad = grad.to(dtype)
        if grad_hidden is not None:
            grad_hidden[part] = grad @ low
        if grad_weight is not None:
            grad_weight += grad.T @ states
    return loss / len(targets), grad_hidden, grad_weight, grad_bias


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Takes its gradients on the way forward, since the logits are there only then."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        loss, *gradients = _cross_entropy(ctx.needs_input_grad[:3], *arguments)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        gradients = (None if own is None else own * grads[0] for own in ctx.saved_tensors)
        return *gradients, None, None, None
