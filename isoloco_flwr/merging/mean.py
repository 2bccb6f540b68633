"""The mean: DiLoCo's and LocalSGD's merge."""

import torch
from torch import Tensor

from isoloco_flwr.merging.stack import as_stack

__all__ = ["mean"]


@torch.no_grad()
def mean(deltas: Tensor) -> Tensor:
    """Average the pseudo-gradients (DiLoCo, arXiv 2311.08105).

    Parameters
    ----------
    deltas : Tensor
        Stack of shape (R, *shape), floating point.

    Returns
    -------
    Tensor
        Shape (*shape), the stack's dtype and device.

    Raises
    ------
    ValueError
        If R = 0, the dtype is not floating point, or a value is not finite.
    """
    return as_stack("mean", deltas).mean(0).to(deltas.dtype)
