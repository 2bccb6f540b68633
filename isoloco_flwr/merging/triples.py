"""Singular triples for merges: the leading ones of a matrix, and the polar factor of a stack."""

from collections.abc import Callable

import torch
from torch import Tensor

from isoloco_flwr.polar import gram, polar

__all__ = ["leading_triples", "orthogonalised", "side_by_side"]


def leading_triples(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading singular triples of a matrix.

    Parameters
    ----------
    matrix : Tensor
        Shape (m, n), float32 or float64.
    count : int
        Number of triples, 0 <= count <= min(m, n).

    Returns
    -------
    tuple[Tensor, Tensor, Tensor]
        Left vectors (m, count), values (count), right vectors (n, count).

    Notes
    -----
    float64 takes a full SVD. float32 takes the eigenvectors of the Gram matrix of the small side,
    in float64 where the matrix is long enough for that to cost little. The Gram matrix squares the
    spread of the singular values: where those asked for reach down too far, below 1e-2 of the
    largest (1e-4 in float64), it is a full SVD too. The triples multiply out to within 1e-4 of
    the exact ones.
    """
    m, n = matrix.shape
    if m < n:
        right, values, left = leading_triples(matrix.mT, count)
        return left, values, right
    long = m >= 2 * n
    size = matrix.abs().amax() if matrix.numel() else matrix.new_zeros(())
    if matrix.dtype == torch.float32 and count > 0 and size > 0 and (long or 2 * count <= n):
        # Entries near 1: the squares of very large or small ones would leave float32's range.
        scaled = matrix / size
        _, vectors = torch.linalg.eigh(gram(scaled, torch.float64 if long else torch.float32))
        right = vectors[:, -count:].flip(-1).float()
        left = scaled @ right
        values = torch.linalg.vector_norm(left, dim=0)
        if values[-1] > (1e-4 if long else 1e-2) * values[0]:
            return left / values, values * size, right
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, :count], values[:count], right[:count].mT


def side_by_side(
    stack: Tensor, count: int, triples: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Put the triples of all workers side by side.

    Parameters
    ----------
    stack : Tensor
        Shape (R, m, n).
    count : int
        Number of triples of each worker.
    triples : Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
        Gives those of one worker's (m, n), as `leading_triples` does.

    Returns
    -------
    tuple[Tensor, Tensor, Tensor]
        Left vectors (m, R · count), values (R · count), right vectors (n, R · count).
    """
    workers, m, n = stack.shape
    left, right = stack.new_empty(m, workers * count), stack.new_empty(n, workers * count)
    values = stack.new_empty(workers * count)
    for worker, delta in enumerate(stack):
        # Into memory that is there: small vectors that stay between large matrices that go leave
        # the C library no room for the next matrix.
        columns = slice(worker * count, (worker + 1) * count)
        left[:, columns], values[columns], right[:, columns] = triples(delta)
    return left, values, right


def orthogonalised(vectors: Tensor) -> Tensor:
    """Return the polar factor of stacked vectors, shape (m, count).

    The nearest matrix with orthonormal columns (rows, where there are more columns than rows).
    Vectors that several workers share count once: directions that the stack lacks stay zero,
    where an SVD would put arbitrary ones.
    """
    if vectors.numel() == 0:
        return vectors
    if vectors.dtype == torch.float32:
        return polar(vectors, "gram")
    u, s, vh = torch.linalg.svd(vectors, full_matrices=False)
    exists = s > s[0] * max(vectors.shape) * torch.finfo(s.dtype).eps
    factor: Tensor = (u * exists) @ vh
    return factor
