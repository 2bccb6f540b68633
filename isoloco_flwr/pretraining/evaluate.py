"""The loss on held-out text."""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from isoloco_flwr.pretraining.inner_loop import next_token_loss

__all__ = ["held_out_loss"]


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel,
    tokens: NDArray[np.uint16],
    *,
    context: int,
    max_sequences: int = 0,
    batch_size: int = 64,
) -> float:
    """Return the mean cross-entropy on held-out text.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model; its parameters are not changed.
    tokens : NDArray[np.uint16]
        Held-out tokens of shape (n,).
    context : int
        Tokens of a sequence.
    max_sequences : int
        Sequences that are read, evenly spaced over the text; 0 reads all.
    batch_size : int
        Sequences at a time.

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
    rows = starts[:, None] + np.arange(context + 1)
    model.eval()
    total = 0.0
    for first in range(0, read, batch_size):
        batch = torch.from_numpy(tokens[rows[first : first + batch_size]].astype(np.int64))
        total += float(next_token_loss(model, batch.to(model.device))) * len(batch)
    return total / read
