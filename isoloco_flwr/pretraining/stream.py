"""Who reads what, when: batches as a pure function of seed, worker and inner step."""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["epochs_seen", "sequences_per_worker", "worker_batch"]


def sequences_per_worker(num_tokens: int, *, context: int, num_workers: int) -> int:
    """Return how many sequences each worker has.

    A corpus of n tokens has (n - 1) // context sequences, since the last one needs one more token
    as its last target; workers have equally many, so that up to num_workers - 1 stay unread.

    Raises
    ------
    ValueError
        If a worker would have none.
    """
    count = (num_tokens - 1) // context // num_workers
    if count < 1:
        raise ValueError(
            f"{num_tokens} tokens are too few for {num_workers} workers: needed are "
            f"{context * num_workers + 1}, one sequence of {context} tokens each"
        )
    return count


def worker_batch(
    tokens: NDArray[np.uint16],
    *,
    context: int,
    seed: int,
    worker: int,
    num_workers: int,
    step: int,
    batch_size: int,
) -> Tensor:
    """Return the batch of one worker in one inner step.

    Parameters
    ----------
    tokens : NDArray[np.uint16]
        All training tokens, of shape (n,).
    context : int
        Tokens of a sequence.
    seed : int
        Seed of the run.
    worker : int
        Number of the worker, 0 <= worker < num_workers.
    num_workers : int
        R.
    step : int
        Inner step, counted from 0 over the whole run.
    batch_size : int
        Sequences of this worker's batch.

    Returns
    -------
    Tensor
        int64 of shape (batch_size, context + 1): inputs and, one further, targets.

    Notes
    -----
    Sequence i holds the tokens from i * context on. Worker w owns the sequences w, w + R,
    w + 2 R, ...: no two workers share one, and each has its share of every document. In each epoch
    it reads all its own in a new order, drawn from (seed, worker, epoch).
    """
    own = sequences_per_worker(len(tokens), context=context, num_workers=num_workers)
    rows = np.empty((batch_size, context + 1), dtype=np.int64)
    for row, place in enumerate(range(step * batch_size, (step + 1) * batch_size)):
        epoch, within = divmod(place, own)
        sequence = worker + num_workers * int(_order(seed, worker, epoch, own)[within])
        rows[row] = tokens[sequence * context : sequence * context + context + 1]
    return torch.from_numpy(rows)


def epochs_seen(
    num_tokens: int, *, context: int, num_workers: int, steps: int, batch_size: int
) -> float:
    """Return how often a worker has read its part after so many inner steps."""
    own = sequences_per_worker(num_tokens, context=context, num_workers=num_workers)
    return steps * batch_size / own


@lru_cache(maxsize=8)
def _order(seed: int, worker: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, worker, epoch)).permutation(count)
