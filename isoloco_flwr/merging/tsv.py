"""TSV-M: the leading singular triples of every worker, freed of their interference."""

import torch
from torch import Tensor

from isoloco_flwr.merging.stack import as_stack
from isoloco_flwr.merging.triples import leading_triples, orthogonalised, side_by_side

__all__ = ["tsv"]


@torch.no_grad()
def tsv(deltas: Tensor, singular_ratio: float | None = None, decorrelate: bool = True) -> Tensor:
    """Add up every worker's leading singular triples (TSV-Merge, arXiv 2412.00081).

    The top max(1, int(singular_ratio · min(m, n))) triples of each pseudo-gradient stand side by
    side; left and right vectors are each replaced by their stack's polar factor; the product
    U Σ Vᵀ is a *sum* over the workers, not a mean. One worker alone gives its pseudo-gradient
    back. A parameter that is not 2-D is averaged.

    Parameters
    ----------
    deltas : Tensor
        Stack of shape (R, *shape), floating point.
    singular_ratio : float | None
        Share of the triples taken from each worker, 0 < ratio <= 1; None is 1/R.
    decorrelate : bool
        Whether to take the polar factors; without, the truncated pseudo-gradients are summed.

    Returns
    -------
    Tensor
        Shape (*shape), the stack's dtype and device.

    Raises
    ------
    ValueError
        If R = 0, the dtype is not floating point, or a value is not finite.
    """
    stack = as_stack("tsv", deltas)
    if stack.ndim != 3 or len(stack) == 1 or stack.numel() == 0:
        return stack.mean(0).to(deltas.dtype)
    ratio = 1 / len(stack) if singular_ratio is None else singular_ratio
    count = max(1, int(ratio * min(stack.shape[1:])))
    left, values, right = side_by_side(stack, count, lambda delta: leading_triples(delta, count))
    if decorrelate:
        left, right = orthogonalised(left), orthogonalised(right)
    return ((left * values) @ right.mT).to(deltas.dtype)
