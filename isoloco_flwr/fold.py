"""Adding up what many workers moved: the loop that a round's time goes into.

It is bound by memory: every reply is read once, sums and parameters once for a group of replies,
and whether all of it is finite is seen while the new sums are in a register or a cache. NumPy does
it in two instructions a reply; where numba is installed, the same additions are compiled into one
loop over all tensors, with the same bits.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["FoldTensors", "fastest_fold", "flat_array", "fold_plain", "fold_tensors"]

Fold = Callable[
    [NDArray[Any], NDArray[Any], NDArray[Any], Sequence[NDArray[Any]], Sequence[float]], bool
]

FoldTensors = Callable[
    [
        Sequence[Tensor],
        Sequence[Tensor],
        Sequence[Tensor] | None,
        Sequence[Sequence[Tensor]],
        Sequence[float],
    ],
    bool,
]

_CHUNK = 1 << 18
"""Elements folded at a time: a chunk of the sum stays in a core's cache."""

_BFLOAT16 = np.dtype([("bits", np.uint16)])
"""How NumPy is told that these are not integers."""


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


def fold_tensors(
    out: Sequence[Tensor],
    total: Sequence[Tensor],
    start: Sequence[Tensor] | None,
    values: Sequence[Sequence[Tensor]],
    weights: Sequence[float],
    fold: Fold = fold_plain,
) -> bool:
    """Fold tensor by tensor, in chunks that stay in a core's cache.

    Parameters
    ----------
    out : Sequence[Tensor]
        Contiguous tensors of float32 or float64; written to.
    total : Sequence[Tensor]
        Sums so far: shapes and dtypes of `out`.
    start : Sequence[Tensor], optional
        Parameters sent: shapes of `out`, any dtype. None stands for zeros.
    values : Sequence[Sequence[Tensor]]
        Parameters of one worker each, at least one: shapes of `out`, any dtype.
    weights : Sequence[float]
        Weight of each worker.
    fold : Fold
        What adds the arrays of a chunk up: `fold_plain` or its equal.

    Returns
    -------
    bool
        Whether all of `out` is finite.
    """
    is_finite = True
    for place, sums in enumerate(map(flat_array, out)):
        old = flat_array(total[place])
        sent = None if start is None else flat_array(start[place])
        arrays = [flat_array(worker[place]) for worker in values]
        for begin in range(0, sums.size, _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            new = sums[chunk]
            is_finite &= fold(
                new,
                old[chunk],
                np.zeros_like(new) if sent is None else _widened(sent[chunk], new.dtype),
                [_widened(array[chunk], new.dtype) for array in arrays],
                weights,
            )
    return is_finite


def flat_array(tensor: Tensor) -> NDArray[Any]:
    """Look at a tensor's values in a row; at the bits of bfloat16, which NumPy does not know."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().reshape(-1).view(_BFLOAT16)
    return tensor.numpy().reshape(-1)


def _widened(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return values in the dtype they are summed in."""
    if values.dtype == dtype:
        return values
    if values.dtype == _BFLOAT16:  # the upper half of a float32
        values = (values["bits"].astype(np.uint32) << 16).view(np.float32)
    return values.astype(dtype)


def fastest_fold() -> FoldTensors:
    """Return the compiled form of `fold_tensors` where numba is installed, else that itself.

    The compiled one keeps threads for as long as it is kept.
    """
    compiled = _compiled_fold()
    if compiled is None:
        return fold_tensors
    return partial(compiled, pool=ThreadPoolExecutor(torch.get_num_threads()))


@cache  # an import that fails is tried anew each time, and this is called in every round
def _compiled_fold() -> Callable[..., bool] | None:
    try:
        from isoloco_flwr.fold_compiled import fold_tensors_compiled
    except (ImportError, RuntimeError):
        # numba is missing, too old for this NumPy, or finds no folder to keep what it compiles.
        return None
    return fold_tensors_compiled
