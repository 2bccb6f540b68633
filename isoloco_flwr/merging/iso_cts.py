"""Iso-CTS: a common subspace and one of every worker's own, all singular values equal."""

import warnings

import torch
from torch import Tensor

from isoloco_flwr.merging.iso_c import iso_c_of_mean
from isoloco_flwr.merging.stack import as_stack
from isoloco_flwr.merging.triples import leading_triples, orthogonalised, side_by_side

__all__ = ["iso_cts"]


@torch.no_grad()
def iso_cts(deltas: Tensor, common_space_fraction: float = 0.8) -> Tensor:
    """Keep the mean's leading directions, fill the others up from the workers (arXiv 2502.04959).

    With W_i = D_i / R, A = Σ W_i and k = min(m, n), every worker gets
    t = min(round((k − int(k·fraction)) / R), k // R) directions and the common subspace the other
    c = k − R·t: the top c triples of A, and the top t triples of each W_i − U_c U_cᵀ W_i. The
    stacked left and right vectors are replaced by their polar factors, all k values by their mean.
    A parameter that is not 2-D is averaged.

    Parameters
    ----------
    deltas : Tensor
        Stack of shape (R, *shape), floating point.
    common_space_fraction : float
        Share of the directions that is common, 0 <= fraction <= 1.

    Returns
    -------
    Tensor
        Shape (*shape), the stack's dtype and device.

    Raises
    ------
    ValueError
        If R = 0, the dtype is not floating point, or a value is not finite.

    Warns
    -----
    UserWarning
        If no worker gets a direction (t = 0): the result is Iso-C's.
    """
    stack = as_stack("iso_cts", deltas)
    workers = len(stack)
    if stack.ndim != 3 or stack.numel() == 0:
        return stack.mean(0).to(deltas.dtype)
    m, n = stack.shape[1:]
    k = min(m, n)
    task = min(round((k - int(k * common_space_fraction)) / workers), k // workers)
    if task == 0:
        warnings.warn(
            f"iso_cts of {workers} workers with common_space_fraction = {common_space_fraction} "
            f"leaves a {m}×{n} parameter no direction per worker: this is Iso-C",
            stacklevel=2,
        )
        return iso_c_of_mean(stack.mean(0)).to(deltas.dtype)
    common = k - workers * task
    # Of a tall A the common triples are enough. Otherwise U is square, and the workers' part is
    # what W_i has along its other columns: a matrix of only k - c rows.
    left, values, right = leading_triples(stack.mean(0), common if m > n else k)
    left, rest = left[:, :common], left[:, common:]

    def own_triples(delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w = delta / workers
        if m > n:
            return leading_triples(w - left @ (left.mT @ w), task)
        u, s, v = leading_triples(rest.mT @ w, task)
        return rest @ u, s, v

    lefts, sizes, rights = side_by_side(stack, task, own_triples)
    # The workers' left vectors are orthogonal to the common ones, which therefore stay as they are.
    u = torch.cat([orthogonalised(lefts), left], dim=-1)
    v = orthogonalised(torch.cat([rights, right[:, :common]], dim=-1))
    size = (sizes.sum() + values[:common].sum()) / k
    return (size * (u @ v.mT)).to(deltas.dtype)
