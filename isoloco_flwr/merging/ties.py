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
    # One pass, worker by worker, so that nothing else has the stack's size: what is kept is added
    # up by sign, and the sign is elected in the end. In float64 a float32 sum that cancels is
    # exactly 0, in whatever order it is added.
    up, down = torch.zeros(2, rows.shape[1], dtype=torch.float64, device=rows.device)
    num_up, num_down = torch.zeros(2, rows.shape[1], device=rows.device)
    for row in rows:
        kept = row * largest(row.abs(), keep)
        up += kept.clamp(min=0)
        num_up += kept > 0
        down += kept.clamp(max=0)
        num_down += kept < 0
    total = up + down
    merged = torch.where(total > 0, up / num_up.clamp(min=1), down / num_down.clamp(min=1))
    merged[total == 0] = 0
    return merged.reshape(stack.shape[1:]).to(deltas.dtype)
