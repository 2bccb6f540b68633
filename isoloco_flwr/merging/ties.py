"""TIES: trim, elect a sign, merge what agrees."""

import torch
from torch import Tensor

from isoloco_flwr.merging.stack import as_stack, kept_count, largest

__all__ = ["ties"]


@torch.no_grad()
def ties(deltas: Tensor, sparsity: float = 0.1) -> Tensor:
    """Average the large entries whose sign is the elected one (TIES-Merging, arXiv 2306.01708).

    Of each worker the max(1, int((1 − sparsity) · numel)) entries of largest magnitude are kept
    (among equal magnitudes the first ones); the sign of their sum over the workers is elected;
    the result is the mean of the kept entries of that sign, 0 where none is or the sum is 0.

    Parameters
    ----------
    deltas : Tensor
        Stack of shape (R, *shape), floating point.
    sparsity : float
        Share of the entries that is trimmed, 0 <= sparsity <= 1.

    Returns
    -------
    Tensor
        Shape (*shape), the stack's dtype and device.

    Raises
    ------
    ValueError
        If R = 0, the dtype is not floating point, or a value is not finite.
    """
    stack = as_stack("ties", deltas)
    rows = stack.reshape(len(stack), -1)
    keep = kept_count(rows.shape[1], sparsity)
    # Worker by worker, so that beside the stack only masks of its size are in memory.
    masks = [largest(row.abs(), keep) for row in rows]
    # In float64 a float32 sum that cancels is exactly 0, in whatever order it is added.
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for row, mask in zip(rows, masks, strict=True):
        total += row * mask
    elected = total.sign().to(rows.dtype)
    merged = torch.zeros_like(rows[0])
    count = torch.zeros_like(rows[0])
    for row, mask in zip(rows, masks, strict=True):
        agrees = mask & (row.sign() == elected) & (elected != 0)
        merged += row * agrees
        count += agrees
    merged /= count.clamp(min=1)
    return merged.reshape(stack.shape[1:]).to(deltas.dtype)
