"""What every merge does first: look at the stack it is handed."""

import torch
from torch import Tensor

__all__ = ["as_stack"]


def as_stack(method: str, deltas: Tensor) -> Tensor:
    """Check a stack of pseudo-gradients and return it in the dtype merges compute in.

    Parameters
    ----------
    method : str
        Name of the merge, for the error.
    deltas : Tensor
        Shape (R, *shape), R >= 1 workers.

    Returns
    -------
    Tensor
        The stack in float64 if it was in float64, else in float32.

    Raises
    ------
    ValueError
        If there is no worker, the dtype is not floating point, or a value is not finite.
    """
    if deltas.ndim == 0 or deltas.shape[0] == 0:
        raise ValueError(
            f"{method}: deltas of shape {tuple(deltas.shape)}, allowed is (R, *shape) with R >= 1"
        )
    if not deltas.is_floating_point():
        raise ValueError(f"{method}: deltas of {deltas.dtype}, allowed is a floating-point dtype")
    if not torch.isfinite(deltas).all():
        bad = [r for r, delta in enumerate(deltas) if not torch.isfinite(delta).all()]
        raise ValueError(f"{method}: values of worker(s) {bad} are not finite")
    return deltas if deltas.dtype == torch.float64 else deltas.float()
