"""Singular triples for merges: the leading ones of a matrix, and the polar factor of a stack."""

import torch
from torch import Tensor

from isoloco_flwr.polar import gram, polar

__all__ = ["leading_triples", "orthogonalised"]


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
