"""Who reads what, when: batches as a pure function of seed, worker and inner step."""

from functools import lru_cache

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["WorkerStream", "epochs_seen", "sequences_per_worker", "worker_batch"]


class WorkerStream:
    """The batches of one worker.

    Parameters
    ----------
    tokens : NDArray[np.integer]
        All training tokens, of shape (n,); a memory map stays one.
    context : int
        Tokens of a sequence.
    seed : int
        Seed of the run.
    worker : int
        Number of the worker, 0 <= worker < num_workers.
    num_workers : int
        R.
    documents : tuple[NDArray[np.int64], NDArray[np.int64]] | None
        Offsets, of shape (number of documents + 1,), and indices of the worker's own documents:
        document i is tokens[offsets[i] : offsets[i + 1]], see `partition_documents`. None shares
        the tokens out alike (IID).

    Attributes
    ----------
    sequences : int
        How many sequences the worker has.

    Raises
    ------
    ValueError
        If the worker has less than one sequence.

    Notes
    -----
    Sequence i holds the tokens from i * context on and one more, its last target. Without
    documents, worker w owns the sequences w, w + R, w + 2 R, ... of all tokens: no two workers
    share one, each has its share of every document, and each has equally many, so that up to R - 1
    stay unread. With documents, its sequences are those of its own documents one after the other.
    In each epoch it reads all its sequences in a new order, drawn from (seed, worker, epoch).
    Nothing but the arguments decides a batch: a resumed or retried round reads the same.
    """

    def __init__(
        self,
        tokens: NDArray[np.integer],
        *,
        context: int,
        seed: int,
        worker: int,
        num_workers: int,
        documents: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> None:
        # Indexing a memory map itself costs several times what indexing a view of it does.
        self._tokens = np.asarray(tokens)
        self._context = context
        self._seed = seed
        self._worker = worker
        if documents is None:
            self._first, self._every = worker, num_workers
            self.sequences = sequences_per_worker(
                len(tokens), context=context, num_workers=num_workers
            )
            self._pieces = None
        else:
            self._first, self._every = 0, 1
            offsets, indices = documents
            self._pieces = _Pieces(offsets, indices)
            self.sequences = max(self._pieces.tokens - 1, 0) // context
            if self.sequences < 1:
                raise ValueError(
                    f"worker {worker} of {num_workers} has {self._pieces.tokens} tokens in "
                    f"{len(indices)} documents, too few for one sequence of {context} tokens and "
                    "its last target: take fewer workers, more text or another data.partitioner"
                )

    def batch(self, step: int, batch_size: int) -> Tensor:
        """Return the batch of an inner step.

        Parameters
        ----------
        step : int
            Inner step, counted from 0 over the whole run.
        batch_size : int
            Sequences of this worker's batch.

        Returns
        -------
        Tensor
            int64 of shape (batch_size, context + 1): inputs and, one further, targets.
        """
        epochs, within = np.divmod(
            np.arange(step * batch_size, (step + 1) * batch_size), self.sequences
        )
        own = np.empty(batch_size, dtype=np.int64)
        for epoch in range(epochs[0], epochs[-1] + 1):
            rows = epochs == epoch
            own[rows] = _order(self._seed, self._worker, epoch, self.sequences)[within[rows]]
        starts = (self._first + self._every * own) * self._context
        if self._pieces is None:
            windows = sliding_window_view(self._tokens, self._context + 1)
            rows = windows[starts]
        else:
            rows = self._tokens[self._pieces.places(starts, self._context + 1)]
        return torch.from_numpy(rows.astype(np.int64))

    def epochs(self, steps: int, batch_size: int) -> float:
        """Return how often the worker has read its sequences after so many inner steps."""
        return steps * batch_size / self.sequences


class _Pieces:
    """Documents one after the other, as the pieces of the tokens they lie in."""

    def __init__(self, offsets: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        begin, end = offsets[indices], offsets[indices + 1]
        # Documents that are neighbours in the tokens as well make one piece.
        first = np.flatnonzero(np.concatenate(([True], begin[1:] != end[:-1])))[: len(indices)]
        begins = np.concatenate(([0], np.cumsum(end - begin)))
        self.tokens = int(begins[-1])
        self._begins = begins[first]  # counted in the worker's own tokens
        self._shifts = begin[first] - begins[first]

    def places(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return where in the tokens the worker's own tokens from each start on lie."""
        own = starts[:, None] + np.arange(length)
        return own + self._shifts[np.searchsorted(self._begins, own, side="right") - 1]


def sequences_per_worker(num_tokens: int, *, context: int, num_workers: int) -> int:
    """Return how many sequences each of the workers has that share all tokens alike.

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
    tokens: NDArray[np.integer],
    *,
    context: int,
    seed: int,
    worker: int,
    num_workers: int,
    step: int,
    batch_size: int,
) -> Tensor:
    """Return one batch of the `WorkerStream` without documents."""
    stream = WorkerStream(
        tokens, context=context, seed=seed, worker=worker, num_workers=num_workers
    )
    return stream.batch(step, batch_size)


def epochs_seen(
    num_tokens: int, *, context: int, num_workers: int, steps: int, batch_size: int
) -> float:
    """Return how often a worker has read its share of all tokens after so many inner steps."""
    own = sequences_per_worker(num_tokens, context=context, num_workers=num_workers)
    return steps * batch_size / own


@lru_cache(maxsize=8)
def _order(seed: int, worker: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, worker, epoch)).permutation(count)
