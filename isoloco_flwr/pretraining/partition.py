"""Which documents every worker trains on, when the workers' data shall differ."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner  # type: ignore[import-untyped]

__all__ = ["PARTITIONERS", "partition_documents"]

PARTITIONERS = ("dirichlet", "label", "size", "natural")
"""Ways to share documents out; "iid" needs none of them, see `WorkerStream`."""

_SHUFFLE = 0x5AFF1E
"""Keeps the order of the documents apart from what the partitioner draws from the same seed."""


def partition_documents(
    lengths: NDArray[np.int64],
    labels: NDArray[np.int32] | None,
    label_names: Sequence[str],
    *,
    partitioner: str,
    num_workers: int,
    alpha: float,
    seed: int,
) -> list[NDArray[np.int64]]:
    """Share documents out among the workers.

    Parameters
    ----------
    lengths : NDArray[np.int64]
        Tokens of every document, of shape (n,).
    labels : NDArray[np.int32] | None
        Every document's label as an index into `label_names`, of shape (n,).
    label_names : Sequence[str]
        Names of the labels in the order in which "label" keeps neighbours together.
    partitioner : {"dirichlet", "label", "size", "natural"}
        - "dirichlet": of every label each worker gets a share drawn from a symmetric Dirichlet
          distribution (arXiv 1905.12022; `DirichletPartitioner` of flwr-datasets).
        - "label": documents of one label have one worker, so that there must be as many labels as
          workers. Of more, neighbouring labels go together: the largest worker has as few
          tokens as that allows, and the others' numbers of tokens are near one another.
        - "size": worker w gets a random share of the documents in proportion to w + 1
          (`LinearPartitioner` of flwr-datasets).
        - "natural": all documents are the node's own, for whichever worker it is: the nodes'
          sources differ, and nothing is shared out.
    num_workers : int
        R.
    alpha : float
        Concentration of "dirichlet": the smaller, the less alike are the workers.
    seed : int
        Decides what is drawn at random, together with the other arguments.

    Returns
    -------
    list[NDArray[np.int64]]
        Documents of every worker, ascending; but for "natural" each document has one worker.

    Raises
    ------
    ValueError
        If the partitioner is unknown or lacks its labels, or a worker gets no document.
    ImportError
        If flwr-datasets, which all but "natural" take, is not installed.
    """
    if partitioner not in PARTITIONERS:
        raise ValueError(
            f"data.partitioner = {partitioner!r}: allowed is one of iid, {', '.join(PARTITIONERS)}"
        )
    if partitioner == "natural":
        return [np.arange(len(lengths))] * num_workers

    def nothing_for(worker: int, advice: str) -> ValueError:
        return ValueError(
            f"data.partitioner = {partitioner!r}: worker {worker} of {num_workers} gets none of "
            f"the {len(lengths)} documents; {advice}"
        )

    if num_workers > len(lengths):
        raise nothing_for(len(lengths), "take fewer workers or a source with more documents")
    shuffled = np.random.default_rng((seed, _SHUFFLE)).permutation(len(lengths))
    if partitioner == "size":
        try:
            return _linear(shuffled, num_workers)
        except ValueError as error:
            units = num_workers * (num_workers + 1) // 2
            raise nothing_for(
                0, f"take fewer workers or more than {units} documents, 1 + 2 + ... + {num_workers}"
            ) from error
    if labels is None:
        raise ValueError(
            f"data.partitioner = {partitioner!r} goes by labels, which the documents lack: name "
            "their column in data.label-column"
        )
    if partitioner == "label":
        documents = np.bincount(labels, minlength=len(label_names))
        present = np.flatnonzero(documents)
        if len(present) < num_workers:
            raise nothing_for(
                len(present), f"there are {len(present)} labels: take at most as many workers"
            )
        cuts = _even_cuts(np.bincount(labels, lengths).astype(np.int64)[present], num_workers)
        sizes = np.add.reduceat(documents[present], cuts).tolist()
        return _by_size(np.argsort(labels, kind="stable"), sizes)
    try:
        return _dirichlet(shuffled, labels, num_workers, alpha, seed, at_least=1)
    except ValueError as error:
        workers = _dirichlet(shuffled, labels, num_workers, alpha, seed, at_least=0)
        raise nothing_for(
            next(worker for worker, own in enumerate(workers) if not len(own)),
            "raise data.dirichlet-alpha or take fewer workers",
        ) from error


def _dirichlet(
    order: NDArray[np.int64],
    labels: NDArray[np.int32],
    num_workers: int,
    alpha: float,
    seed: int,
    *,
    at_least: int,
) -> list[NDArray[np.int64]]:
    from flwr_datasets.partitioner import DirichletPartitioner

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one for each of its tries
        return _apply(
            DirichletPartitioner(
                num_partitions=num_workers,
                partition_by="label",
                alpha=float(alpha),
                min_partition_size=at_least,
                shuffle=False,
                seed=seed,
            ),
            order,
            labels,
            num_workers,
        )


def _linear(order: NDArray[np.int64], num_workers: int) -> list[NDArray[np.int64]]:
    from flwr_datasets.partitioner import LinearPartitioner

    return _apply(LinearPartitioner(num_workers), order, None, num_workers)


def _by_size(order: NDArray[np.int64], sizes: list[int]) -> list[NDArray[np.int64]]:
    from flwr_datasets.partitioner import SizePartitioner

    return _apply(SizePartitioner(sizes), order, None, len(sizes))


def _apply(
    partitioner: "Partitioner",
    order: NDArray[np.int64],
    labels: NDArray[np.int32] | None,
    num_workers: int,
) -> list[NDArray[np.int64]]:
    """Partition the table of the documents in this order."""
    from datasets import Dataset  # type: ignore[import-untyped]

    columns = {"document": order} if labels is None else {"document": order, "label": labels[order]}
    partitioner.dataset = Dataset.from_dict(columns)
    # Partitioners read the labels one at a time, which is slow in NumPy's format.
    parts = [
        partitioner.load_partition(worker).with_format("numpy") for worker in range(num_workers)
    ]
    return [np.sort(part["document"][:]) for part in parts]


def _even_cuts(tokens: NDArray[np.int64], num_workers: int) -> NDArray[np.int64]:
    """Return the first label of every worker, when neighbouring labels go together.

    No other choice has a smaller largest worker. Within that, each takes the number of labels
    whose tokens come nearest to an equal share of what is left.
    """
    ends = np.concatenate(([0], np.cumsum(tokens)))
    count = len(tokens)

    def latest_cuts(largest: int) -> list[int]:
        """Fill each worker from the first on up to the largest allowed."""
        cuts = [0]
        for left in range(num_workers - 1, -1, -1):
            full = int(np.searchsorted(ends, ends[cuts[-1]] + largest, side="right")) - 1
            cuts.append(min(full, count - left))
        return cuts

    low, high = int(tokens.max()), int(ends[-1])
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if latest_cuts(middle)[-1] == count else (middle + 1, high)
    latest = latest_cuts(low)
    # The earliest cuts are the latest of the labels read backwards.
    earliest = [0] * (num_workers + 1)
    earliest[num_workers] = count
    for worker in range(num_workers - 1, 0, -1):
        fits = int(np.searchsorted(ends, ends[earliest[worker + 1]] - low, side="left"))
        earliest[worker] = max(fits, worker)
    cuts = [0]
    for worker in range(1, num_workers):
        start = cuts[-1]
        share = (ends[-1] - ends[start]) / (num_workers - worker + 1)
        nearest = start + int(np.abs(ends[start:] - ends[start] - share).argmin())
        # No further than this worker may hold; `latest` leaves the later ones their labels.
        furthest = int(np.searchsorted(ends, ends[start] + low, side="right")) - 1
        cuts.append(min(max(nearest, earliest[worker], start + 1), furthest, latest[worker]))
    return np.array(cuts)
