"""Iso-C: the mean with all its singular values made equal."""

import torch
from torch import Tensor

from isoloco_flwr.merging.stack import as_stack
from isoloco_flwr.polar import isotropic

__all__ = ["iso_c", "iso_c_of_mean"]


@torch.no_grad()
def iso_c(deltas: Tensor, polar: str = "svd", scale: str = "nuclear") -> Tensor:
    """Average, then replace every singular value by the mean one.

    With A = mean of the stack = U S Vᵀ the result is mean(S) · U Vᵀ (Iso-C, arXiv 2502.04959;
    as the merge of IsoLoCo, arXiv 2607.03011). A parameter that is not 2-D is averaged.

    Parameters
    ----------
    deltas : Tensor
        Stack of shape (R, *shape), floating point.
    polar : str
        Method for the polar factor, see `isoloco_flwr.polar.polar`.
    scale : {"nuclear", "rms"}
        How mean(S) is found, see `isoloco_flwr.polar.isotropic`.

    Returns
    -------
    Tensor
        Shape (*shape), the stack's dtype and device.

    Raises
    ------
    ValueError
        If R = 0, the dtype is not floating point, a value is not finite, or an option is unknown.
    """
    return iso_c_of_mean(as_stack("iso_c", deltas).mean(0), polar, scale).to(deltas.dtype)


@torch.no_grad()
def iso_c_of_mean(mean_delta: Tensor, polar: str = "svd", scale: str = "nuclear") -> Tensor:
    """Iso-C from the mean pseudo-gradient of shape (*shape), which is all that it needs."""
    return isotropic(mean_delta, polar, scale) if mean_delta.ndim == 2 else mean_delta
