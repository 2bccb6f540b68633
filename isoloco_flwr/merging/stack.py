"""What merges share: the check of the stack they are handed, and the choice of entries."""

import torch
from torch import Tensor

__all__ = ["as_stack", "kept_count", "largest"]


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
    # Extremes are not finite where any value is not; one pass, and no mask of the stack's size.
    if deltas.numel() and not torch.isfinite(torch.stack(deltas.detach().aminmax())).all():
        bad = [r for r, delta in enumerate(deltas) if not torch.isfinite(delta).all()]
        raise ValueError(f"{method}: values of worker(s) {bad} are not finite")
    return deltas if deltas.dtype == torch.float64 else deltas.float()


def kept_count(numel: int, sparsity: float) -> int:
    """Return how many of `numel` entries are kept: at least one, and none of none."""
    return min(numel, max(1, int((1 - sparsity) * numel)))


def largest(values: Tensor, count: int) -> Tensor:
    """Return the mask of exactly the `count` largest values of a vector, the first ones of ties."""
    if count == values.numel():
        return torch.ones_like(values, dtype=torch.bool)
    threshold = values.kthvalue(values.numel() - count + 1).values
    mask = values > threshold
    tied = (values == threshold).nonzero().squeeze(-1)
    mask[tied[: count - int(mask.sum())]] = True
    return mask
