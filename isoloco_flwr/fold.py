"""Adding up what many workers moved: the loop that a round's time goes into.

It is bound by memory: every reply is read once, sums and parameters once for a group of replies,
and whether all of it is finite is seen while the new sums are in a register or a cache. NumPy does
it in two instructions a reply; where numba is installed, the same additions are compiled into one
loop, with the same bits.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fold", "fastest_fold", "fold_plain"]

Fold = Callable[
    [NDArray[Any], NDArray[Any], NDArray[Any], Sequence[NDArray[Any]], Sequence[float]], bool
]


def fold_plain(
    out: NDArray[Any],
    total: NDArray[Any],
    start: NDArray[Any],
    values: Sequence[NDArray[Any]],
    weights: Sequence[float],
) -> bool:
    """Set out = total + Σ weight · (start − value), added one after the other.

    Parameters
    ----------
    out : NDArray
        Shape (n,), float32 or float64; written to.
    total : NDArray
        Sums so far: shape and dtype of `out`.
    start : NDArray
        Parameters sent: shape and dtype of `out`.
    values : Sequence[NDArray]
        Parameters of one worker each, at least one: shape and dtype of `out`.
    weights : Sequence[float]
        Weight of each worker.

    Returns
    -------
    bool
        Whether all of `out` is finite. What is not in any summand is not in the sum.
    """
    moved = np.empty_like(out)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller hears of it
        for value, weight in zip(values, weights, strict=True):
            np.subtract(start, value, out=moved)
            if weight != 1:
                np.multiply(moved, weight, out=moved)
            total = np.add(total, moved, out=out)
        # A sum of finite values is finite but for an overflow, which only the slow pass can tell.
        return math.isfinite(np.add.reduce(out)) or bool(np.isfinite(out).all())


@lru_cache(maxsize=1)
def fastest_fold() -> Fold:
    """Return the compiled form of `fold_plain` where numba is installed, else that itself."""
    try:
        from isoloco_flwr.fold_compiled import fold_compiled
    except (ImportError, RuntimeError):
        # numba is missing, too old for this NumPy, or finds no folder to keep what it compiles.
        return fold_plain
    return fold_compiled
