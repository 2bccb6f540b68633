"""The polar factor of a matrix, and the matrix with all singular values replaced by their mean.

A matrix A = U S Vᵀ of shape (m, n), k = min(m, n), has the polar factor U Vᵀ: the same singular
directions, every singular value 1. Scaled by mean(S) it is the isotropic matrix that Iso-C steps
along (arXiv 2502.04959, arXiv 2607.03011).
"""

import torch
from torch import Tensor

__all__ = ["METHODS", "SCALES", "isotropic", "polar"]

METHODS = ("svd",)
"""Ways to the polar factor."""

SCALES = ("nuclear", "rms")
"""Ways to the isotropic matrix's scale."""


@torch.no_grad()
def polar(matrix: Tensor, method: str = "svd") -> Tensor:
    """Return the polar factor U Vᵀ of a matrix, or of every matrix of a batch.

    Parameters
    ----------
    matrix : Tensor
        Shape (..., m, n), floating point, finite. float64 is computed in float64, every other
        dtype in float32.
    method : str
        One of `METHODS`.

    Returns
    -------
    Tensor
        The matrix's shape, dtype and device. A zero matrix gives a zero matrix.

    Raises
    ------
    ValueError
        If the method is unknown, or the input has fewer than two dimensions or no floating point.
    """
    scaled, _ = _normalised(_checked(matrix, method))
    return _polar_factor(scaled, method).to(matrix.dtype)


@torch.no_grad()
def isotropic(matrix: Tensor, method: str = "svd", scale: str = "nuclear") -> Tensor:
    """Return the polar factor scaled to the size of the matrix.

    Parameters
    ----------
    matrix, method
        As in `polar`.
    scale : {"nuclear", "rms"}
        "nuclear" is ⟨O, A⟩ / k with O the polar factor computed: the mean singular value where O
        is exact. "rms" is ‖A‖_F / √k, the proxy published with IsoLoCo (arXiv 2607.03011); it
        is never smaller, and reads 36 % to 100 % higher on decaying spectra.

    Returns
    -------
    Tensor
        The matrix's shape, dtype and device. A zero matrix gives a zero matrix.

    Raises
    ------
    ValueError
        If method or scale is unknown, or the input has fewer than two dimensions or no floating
        point.
    """
    if scale not in SCALES:
        raise ValueError(f"scale {scale!r}: allowed are {', '.join(SCALES)}")
    scaled, exponent = _normalised(_checked(matrix, method))
    factor = _polar_factor(scaled, method)
    k = max(1, min(matrix.shape[-2:]))
    if scale == "nuclear":
        size = (factor * scaled).sum((-2, -1), keepdim=True) / k
    else:
        size = torch.linalg.matrix_norm(scaled, keepdim=True) / k**0.5
    result: Tensor = torch.ldexp(factor.mul_(size), exponent)
    return result.to(matrix.dtype)


def _checked(matrix: Tensor, method: str) -> Tensor:
    if method not in METHODS:
        raise ValueError(f"method {method!r}: allowed are {', '.join(METHODS)}")
    if matrix.ndim < 2:
        raise ValueError(f"matrix of shape {tuple(matrix.shape)}: allowed is (..., m, n)")
    if not matrix.is_floating_point():
        raise ValueError(f"matrix of {matrix.dtype}: allowed is a floating-point dtype")
    return matrix if matrix.dtype == torch.float64 else matrix.float()


def _normalised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Scale to entries of at most 1 by a power of two, which rounds nothing.

    Squares of entries from 1e-30 to 1e+30 would leave the range of float32.
    """
    if matrix.numel() == 0:
        return matrix, torch.zeros((), dtype=torch.int32, device=matrix.device)
    _, exponent = torch.frexp(matrix.abs().amax((-2, -1), keepdim=True))
    exponent = exponent.clamp(-126, 126)  # 2^exponent is a normal float32
    return torch.ldexp(matrix, -exponent), exponent


def _polar_factor(matrix: Tensor, method: str) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    # The SVD completes missing directions by arbitrary ones; of a zero matrix nothing is left.
    exists = (s[..., :1, None] > 0).to(matrix.dtype) if s.shape[-1] else s.new_zeros(())
    return (u * exists) @ vh
