"""The loss on held-out text."""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from isoloco_flwr.pretraining.loss import next_token_loss

__all__ = ["held_out_loss"]

TOKENS_AT_ONCE = 64 * 128
"""Tokens of a batch; a longer sequence is a batch of its own."""


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel,
    tokens: NDArray[np.integer],
    *,
    context: int,
    max_sequences: int = 0,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> float:
    """Return the mean cross-entropy on held-out text.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model; its parameters are not changed.
    tokens : NDArray[np.integer]
        Held-out tokens of shape (n,).
    context : int
        Tokens of a sequence.
    max_sequences : int
        Sequences that are read, evenly spaced over the text; 0 reads all.
    tokens_at_once : int
        Most tokens of a batch, which bounds the memory; a batch has one sequence at least.

    Returns
    -------
    float
        Nats per token.

    Raises
    ------
    ValueError
        If the text is shorter than one sequence.
    """
    count = (len(tokens) - 1) // context
    if count < 1:
        raise ValueError(
            f"{len(tokens)} held-out tokens are too few: needed are {context + 1}, one sequence"
        )
    read = min(count, max_sequences) if max_sequences else count
    starts = np.arange(read) * count // read * context
    batch_size = max(1, tokens_at_once // context)
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, read, batch_size):
        rows = starts[first : first + batch_size, None] + np.arange(context + 1)
        batch = torch.from_numpy(tokens[rows].astype(np.int64)).to(model.device)
        total = total.to(model.device) + next_token_loss(model, batch).double() * len(batch)
    return float(total) / read
