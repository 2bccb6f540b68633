"""What a merge saw: how far the workers' pseudo-gradients of chosen matrices agree."""

import math
from collections import defaultdict

import torch
from torch import Tensor

__all__ = ["MergeDiagnostics", "spectrum"]


class MergeDiagnostics:
    """Collects the figures of one round.

    Memory is one more matrix for each that is looked at, however many workers there are.
    """

    def __init__(self) -> None:
        self._unit_sums: dict[str, Tensor] = {}
        self._norms: defaultdict[str, list[float]] = defaultdict(list)
        self._figures: dict[str, dict[str, float | None]] = {}

    def add(self, name: str, delta: Tensor) -> None:
        """Take in one worker's pseudo-gradient (m, n) of a matrix."""
        delta = delta.float()
        norm = float(torch.linalg.vector_norm(delta))
        self._norms[name].append(norm)
        unit = delta / norm if norm else torch.zeros_like(delta)
        if name in self._unit_sums:
            self._unit_sums[name] += unit
        else:
            self._unit_sums[name] = unit

    def merged(self, name: str, mean: Tensor, merged: Tensor | None) -> None:
        """Take in the mean of the pseudo-gradients (m, n) and what the merge made of it, if any."""
        norms = self._norms.pop(name)
        total = float(torch.linalg.vector_norm(self._unit_sums.pop(name)))
        count = len(norms)
        mean_norm = sum(norms) / count
        figures = {
            # Of unit vectors u: |Σu|² = Σ|u|² + the cosines of all pairs, each twice.
            "cosine": (total**2 - sum(norm > 0 for norm in norms)) / (count * (count - 1))
            if count > 1
            else None,
            "mean-norm": mean_norm,
            "smallest-norm": min(norms),
            "largest-norm": max(norms),
            "norm-of-mean": float(torch.linalg.vector_norm(mean.float())),
        }
        figures["interference"] = (
            figures["norm-of-mean"] / mean_norm if mean_norm else None  # type: ignore[operator]
        )
        for when, matrix in (("mean", mean), ("merged", merged)):
            if matrix is not None:
                figures[f"effective-rank-{when}"], figures[f"condition-{when}"] = spectrum(matrix)
        self._figures[name] = figures

    def figures(self) -> dict[str, dict[str, float | None]]:
        """Return the figures by name of the matrix; None where one is not defined."""
        return self._figures


def spectrum(matrix: Tensor) -> tuple[float | None, float | None]:
    """Return effective rank and condition number of a matrix.

    Parameters
    ----------
    matrix : Tensor
        Shape (m, n).

    Returns
    -------
    tuple[Optional[float], Optional[float]]
        exp of the entropy of the singular values, normalised to add up to 1 (Roy and Vetterli
        2007), from 1 to min(m, n); largest over smallest singular value. None for a matrix of
        zeros, and for the condition of one that lacks directions.
    """
    values = torch.linalg.svdvals(matrix.double())
    if not values.numel() or not values[0] > 0:
        return None, None
    shares = values / values.sum()
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    smallest = float(values[-1])
    lacks = smallest <= float(values[0]) * max(matrix.shape) * torch.finfo(torch.float32).eps
    return math.exp(entropy), None if lacks else float(values[0]) / smallest
