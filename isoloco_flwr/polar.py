"""The polar factor of a matrix, and the matrix with all singular values replaced by their mean.

A matrix A = U S Vᵀ of shape (m, n), k = min(m, n), has the polar factor U Vᵀ: the same singular
directions, every singular value 1. Scaled by mean(S) it is the isotropic matrix that Iso-C steps
along (arXiv 2502.04959, arXiv 2607.03011).

With X the matrix or its transpose, whichever is tall, U Vᵀ = X G^(-1/2) for the Gram matrix
G = XᵀX. All methods but "svd" work on that small k×k matrix where X is much taller than wide, so
that the long side costs two products, XᵀX and X times the root.

=============== ================================================================================
svd             full singular value decomposition; the reference
gram            eigendecomposition of G in float64, exact to float32's rounding
newton_schulz   the 5 quintic steps published with Muon (Jordan et al. 2024): singular values
                end between 0.7 and 1.2
polar_express   quintic steps, each the best possible after those before it (arXiv 2505.16932),
                as many as `EXPRESS_ACCURACY` asks for
rational3       G^(-1/2) as a sum of three shifted inverses: singular values end within 0.05 of 1
                (root mean square) where they are spread over up to three and a half decades
rational1       one shifted inverse: within 0.14 over up to two decades, as near as the five
                Newton-Schulz steps beyond, in a fraction of their time
fast            the one that was quickest when measured: see `fast_method`
=============== ================================================================================

Singular directions that a matrix lacks carry nothing in the result, except for "svd", whose factor
is completed by arbitrary orthonormal directions.
"""

import math
from functools import cache

import torch
from torch import Tensor

__all__ = ["METHODS", "SCALES", "fast_method", "isotropic", "polar"]

METHODS = ("svd", "gram", "newton_schulz", "polar_express", "rational3", "rational1", "fast")
"""Ways to the polar factor."""

SCALES = ("nuclear", "rms")
"""Ways to the isotropic matrix's scale."""

Steps = tuple[tuple[float, float, float], ...]
"""Coefficients of x, x³ and x⁵ of one odd quintic after the other."""

NEWTON_SCHULZ_STEPS: Steps = ((3.4445, -4.7750, 2.0315),) * 5
"""The published step, five times."""

EXPRESS_FLOOR = 3e-4
"""Smallest singular value, relative to the largest, that "polar_express" takes to 1."""

EXPRESS_ACCURACY = {torch.float64: 1e-12, torch.float32: 1e-4}
"""Largest distance to 1 of the singular values that "polar_express" leaves, by dtype."""

RATIONALS = {
    "rational1": ((2.42170602, -1.84210236), ((1.03287e-3, 7.07536308e-2),)),
    "rational3": (
        (1.75733872, -1.04034086),
        (
            (3.32018704e-7, 1.06602592e-3),
            (5.19267712e-5, 1.11273979e-2),
            (6.71339673e-3, 1.27159576e-1),
        ),
    ),
}
"""(a, b), (t, r), ...: x (a + b x² + Σ r/(x² + t)) is nearest to 1 in least squares over log x.

One pole: from x = 10^-2 to 1; three poles: from 10^-3.5 to 1.
"""

RATIONAL1_TRACES = (0.146338684, 1.554391744, -0.783023750, -5.75940681e-3, 5.52856465e-5)
"""Coefficients of 1, x², x⁴, κ and κ² in a fit to x, κ = r/(x² + t) being the one pole's term.

Least squares over log-uniform spectra of 0.3 to 3.5 decades: their sums, read from traces, are
within 2 % of the sum of singular values, where ⟨O, A⟩ is up to 9 % off.
"""

TALL = {"svd": 2.0, "newton_schulz": 1.5, "polar_express": 3.0}
"""From this ratio of the sides on, iterations run on the Gram matrix and not on X, "svd" on R."""

BLOCK = 256
"""Blocks below this side are multiplied whole."""

BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
"""Names that torch has for a processor's instructions for products in bfloat16."""

ROWS = 1024
"""Rows of a tall matrix multiplied at a time: they stay in the processor's cache."""


@torch.no_grad()
def polar(matrix: Tensor, method: str = "svd") -> Tensor:
    """Return the polar factor U Vᵀ of a matrix, or of every matrix of a batch.

    Parameters
    ----------
    matrix : Tensor
        Shape (..., m, n), floating point, finite. float64 is computed in float64, every other
        dtype in float32 (bfloat16 inside "newton_schulz" where the device has instructions for it).
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
    _check(matrix, method)
    return _by_matrix(matrix, method, None)


@torch.no_grad()
def isotropic(matrix: Tensor, method: str = "svd", scale: str = "nuclear") -> Tensor:
    """Return the polar factor scaled to the size of the matrix.

    Parameters
    ----------
    matrix, method
        As in `polar`.
    scale : {"nuclear", "rms"}
        "nuclear" is ⟨O, A⟩ / k with O the polar factor computed: the mean singular value where O
        is exact ("rational1" reads the mean from traces, to 2 %). "rms" is ‖A‖_F / √k, the proxy
        published with IsoLoCo (arXiv 2607.03011); it is never smaller, and reads 36 % to 100 %
        higher on decaying spectra.

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
    _check(matrix, method)
    if scale not in SCALES:
        raise ValueError(f"scale {scale!r}: allowed are {', '.join(SCALES)}")
    return _by_matrix(matrix, method, scale)


def fast_method(m: int, n: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return the method that "fast" stands for, by shape, dtype and device.

    On a processor "rational1" is the quickest from 128 rows and columns on, and below that "gram"
    is, which is exact. float64 asks for more digits than a rational has: "gram". A CUDA device
    multiplies far faster than it factorises: "polar_express".
    """
    if device.type != "cpu":
        return "polar_express"
    return "rational1" if min(m, n) >= 128 and dtype != torch.float64 else "gram"


def _check(matrix: Tensor, method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method {method!r}: allowed are {', '.join(METHODS)}")
    if matrix.ndim < 2:
        raise ValueError(f"matrix of shape {tuple(matrix.shape)}: allowed is (..., m, n)")
    if not matrix.is_floating_point():
        raise ValueError(f"matrix of {matrix.dtype}: allowed is a floating-point dtype")


def _by_matrix(matrix: Tensor, method: str, scale: str | None) -> Tensor:
    """Bring to a range that squares stay in, turn tall, go through a batch, undo the first two."""
    if matrix.numel() == 0:
        return matrix.clone()
    m, n = matrix.shape[-2:]
    if method == "fast":
        method = fast_method(m, n, matrix.dtype, matrix.device)
    x, exponent = normalised(matrix.reshape(-1, m, n).to(compute_dtype(matrix)))
    x = x if m >= n else x.mT
    # A processor is busy with one large matrix; batched products pay off for small ones only.
    if len(x) == 1:
        result = _isotropic(x[0], method, scale)[None]
    elif x.device.type == "cpu" and min(m, n) >= BLOCK:
        result = torch.stack([_isotropic(one, method, scale) for one in x])
    else:
        result = _isotropic(x, method, scale)
    if scale is not None and exponent is not None:
        result = torch.ldexp(result, exponent)
    result = (result if m >= n else result.mT).reshape(matrix.shape)
    return result.to(matrix.dtype).contiguous()


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for float64 and float32 for every other dtype."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def normalised(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale matrices whose squares would leave the range of float32 by powers of two.

    That rounds nothing. Entries may be anything from 1e-38 to 1e+38.

    Returns
    -------
    tuple[Tensor, Tensor | None]
        The matrices, and the exponents of shape (..., 1, 1) for `torch.ldexp` to undo the scaling;
        None where nothing was scaled.
    """
    low, high = x.aminmax()
    if 2.0**-30 < max(-low.item(), high.item()) < 2.0**30 and len(x) == 1:
        return x, None
    _, exponent = torch.frexp(x.abs().amax((-2, -1), keepdim=True))
    exponent = exponent.clamp(-126, 126)  # 2^exponent is a normal float32
    return torch.ldexp(x, -exponent), exponent


def _isotropic(x: Tensor, method: str, scale: str | None) -> Tensor:
    """Polar factor (scale None) or isotropic matrix of tall x of shape (m, n) or (b, m, n)."""
    m, k = x.shape[-2:]
    if method == "svd":
        return _by_svd(x, scale)
    if method in ("newton_schulz", "polar_express") and m < TALL[method] * k:
        factor = _iterate(x, method)
        if scale == "nuclear":
            factor *= inner(factor, x) / k
        elif scale == "rms":
            factor *= torch.linalg.matrix_norm(x, keepdim=True) / math.sqrt(k)
        return factor
    # The Gram matrix squares the spread of the singular values: float32's digits are too few for
    # the methods that go down to small ones.
    precise = method in ("gram", "polar_express")
    g = gram(x, torch.float64 if precise else x.dtype)
    if method == "gram":
        root, total = _eigen_root(g)
    elif method in RATIONALS:
        root, total = _rational_root(g, method)
    else:
        root, total = _iterate_root(g, _steps(method, x.dtype), _bound(g, method))
    if scale == "nuclear":
        root *= total / k
    elif scale == "rms":
        root *= (trace(g) / k).sqrt()
    root = root.to(x.dtype)
    # A wide matrix comes transposed: the product is written so that it goes back in order.
    return x @ root if x.is_contiguous() else (root @ x.mT).mT


def _by_svd(x: Tensor, scale: str | None) -> Tensor:
    # Of QR = X with R small the long side takes part in two products only, QR's and the last one.
    is_tall = x.shape[-2] >= TALL["svd"] * x.shape[-1]
    q, x = torch.linalg.qr(x) if is_tall else (None, x)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    if scale == "nuclear":
        value = s.mean(-1)
    elif scale == "rms":
        value = s.square().mean(-1).sqrt()
    else:
        value = (s[..., 0] > 0).to(s)  # of a zero matrix nothing is left
    result: Tensor = u @ (vh * value[..., None, None])
    return result if q is None else torch.matmul(q, result)


# --- symmetric matrices --------------------------------------------------------------------------


def trace(g: Tensor) -> Tensor:
    """Return the trace of (..., n, n) in shape (..., 1, 1)."""
    return g.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of matrices (..., m, n) in shape (..., 1, 1)."""
    return (a * b).sum((-2, -1), keepdim=True)


def _add_to_diagonal(g: Tensor, value: float) -> None:
    g.diagonal(dim1=-2, dim2=-1).add_(value)


def gram(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return XᵀX of x of shape (m, n) or (b, m, n), added up in a dtype."""
    n = x.shape[-1]
    out = torch.zeros(*x.shape[:-2], n, n, dtype=dtype, device=x.device)
    for rows in torch.split(x, ROWS if x.device.type == "cpu" else x.shape[-2], dim=-2):
        rows = rows.to(dtype)
        _add_symmetric(out, rows, rows)
    return _mirror(out)


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """Return AᵀB where that is known to be symmetric: three fifths of the work of a product."""
    n = a.shape[-1]
    out = torch.zeros(*a.shape[:-2], n, n, dtype=a.dtype, device=a.device)
    _add_symmetric(out, a, b)
    return _mirror(out)


def _add_symmetric(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """Add alpha AᵀB, symmetric, to the blocks of out on and above the diagonal."""
    n = out.shape[-1]
    if n <= BLOCK or out.device.type != "cpu":
        _add_product(out, a.mT, b, alpha)
        return
    h = n // 2
    _add_symmetric(out[..., :h, :h], a[..., :h], b[..., :h], alpha)
    _add_symmetric(out[..., h:, h:], a[..., h:], b[..., h:], alpha)
    _add_product(out[..., :h, h:], a[..., :h].mT, b[..., h:], alpha)


def _mirror(out: Tensor) -> Tensor:
    """Copy the blocks above the diagonal to below it, in place."""
    n = out.shape[-1]
    if n > BLOCK and out.device.type == "cpu":
        h = n // 2
        _mirror(out[..., :h, :h])
        _mirror(out[..., h:, h:])
        out[..., h:, :h] = out[..., :h, h:].mT
    return out


def _add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float = 1.0) -> None:
    if out.ndim == 2:
        out.addmm_(a, b, alpha=alpha, beta=beta)
    else:
        out.baddbmm_(a, b, alpha=alpha, beta=beta)


def _invert(g: Tensor) -> None:
    """Invert a positive definite matrix in place.

    By halves, so that nearly all of it is products: in two thirds of the time that LAPACK takes to
    factorise and invert. Its errors grow with the square of the condition number, which must stay
    below about 1e3 in float32.
    """
    n = g.shape[-1]
    if n <= BLOCK // 2:
        g.copy_(torch.cholesky_inverse(torch.linalg.cholesky_ex(g)[0]))
        return
    h = n // 2
    a, b, c, d = g[..., :h, :h], g[..., :h, h:], g[..., h:, :h], g[..., h:, h:]
    _invert(a)
    w = a @ b
    _add_symmetric(d, b, w, -1.0)
    _mirror(d)
    _invert(d)
    _add_product(b, w, d, -1.0, beta=0.0)
    _add_symmetric(a, w.mT, b.mT, -1.0)
    _mirror(a)
    c.copy_(b.mT)


# --- inverse square roots of the Gram matrix, with the sum of singular values --------------------


def _eigen_root(g: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(g)
    # Rounding leaves eigenvalues of this size where the exact ones are zero.
    exists = values > values[..., -1:] * (g.shape[-1] * torch.finfo(g.dtype).eps)
    scales = torch.where(exists, values, torch.inf).pow(-0.25)
    half = (vectors * scales[..., None, :]).mT.contiguous()
    total = torch.where(exists, values, 0).sqrt().sum(-1)[..., None, None]
    return symmetric_product(half, half), total


def _rational_root(g: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """Return the root, and the sum of singular values with shape (..., 1, 1)."""
    largest = _largest_eigenvalue(g)
    (a, b), poles = RATIONALS[method]
    root = g * (b / largest)
    _add_to_diagonal(root, a)
    for t, residue in poles:
        term = g * (1 / (residue * largest))
        _add_to_diagonal(term, t / residue)
        if t > 1e-3:
            _invert(term)
        else:
            # Inverses of halves lose all digits on so steep a spectrum; triangles do not.
            term = torch.cholesky_inverse(torch.linalg.cholesky_ex(term)[0])
        root += term
    if method == "rational1":
        c0, c1, c2, c3, c4 = RATIONAL1_TRACES
        total = largest.sqrt() * (
            c0 * g.shape[-1]
            + c1 * trace(g) / largest
            + c2 * (inner(g, g) / largest / largest)
            + c3 * trace(term)
            + c4 * inner(term, term)
        )
        root *= largest.rsqrt()
    else:
        root *= largest.rsqrt()
        total = inner(root, g)
    return root, total


def _largest_eigenvalue(g: Tensor) -> Tensor:
    """Estimate the largest eigenvalue, shape (..., 1, 1); on average a little too high.

    Eight power steps from the column with the largest diagonal entry find nine tenths of it or
    more; 1.3 times that keeps the whole spectrum where the rationals were fitted.
    """
    column = g.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    v = torch.take_along_dim(g, column, -1)
    tiny = torch.finfo(g.dtype).tiny
    for _ in range(8):
        v = v / torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True).clamp(min=tiny)
        v = g @ v
    largest = 1.3 * torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    return torch.where(largest > 0, largest, 1)


def _iterate_root(g: Tensor, steps: Steps, bound: Tensor) -> tuple[Tensor, Tensor]:
    """G^(-1/2) by odd polynomials x q(x²): the root gains a factor q(G), G becomes G q(G)²."""
    h = g / bound.square()
    # Rounding makes the smallest eigenvalues negative, and those would grow without end.
    _add_to_diagonal(h, torch.finfo(g.dtype).eps)
    root = q = _even_part(h, steps[0])
    for step in steps[1:]:
        h = symmetric_product(symmetric_product(h, q), q)
        q = _even_part(h, step)
        root = symmetric_product(root, q)
    root = root / bound
    return root, inner(root, g)


def _iterate(x: Tensor, method: str) -> Tensor:
    """Polar factor by odd polynomials applied to X itself, for one that is nearly square."""
    # The published steps leave singular values between 0.7 and 1.2, in which bfloat16's rounding
    # of the polynomial does not show; "polar_express" is held to more digits than it has. X itself
    # stays as it is: rounding it would put something into every direction that it lacks, which
    # five steps make 485 times as large.
    short = method == "newton_schulz" and x.dtype == torch.float32 and x.shape[-1] >= BLOCK
    dtype = torch.bfloat16 if short and multiplies_bfloat16(x.device) else x.dtype
    y = x / _bound(gram(x, x.dtype), method)
    for step in _steps(method, x.dtype):
        y = y @ _even_part(gram(y.to(dtype), dtype), step).to(x.dtype)
    return y


def _bound(g: Tensor, method: str) -> Tensor:
    """Upper bound of the largest singular value of X, shape (..., 1, 1)."""
    if method == "newton_schulz":
        bound = trace(g).sqrt()  # the Frobenius norm, as published
    else:
        # The eighth root of the sum of eighth powers: far nearer to the largest.
        bound = torch.linalg.matrix_norm(symmetric_product(g, g), keepdim=True).pow(0.25)
    return torch.where(bound > 0, bound, 1)


def _even_part(g: Tensor, step: tuple[float, float, float]) -> Tensor:
    a, b, c = step
    q = symmetric_product(g, g).mul_(c).add_(g, alpha=b)
    _add_to_diagonal(q, a)
    return q


def _steps(method: str, dtype: torch.dtype) -> Steps:
    if method == "newton_schulz":
        return NEWTON_SCHULZ_STEPS
    return express_steps(EXPRESS_FLOOR, EXPRESS_ACCURACY[dtype])


@cache
def express_steps(floor: float, accuracy: float) -> Steps:
    """Return quintic steps that take [floor, 1] to within accuracy of 1 (arXiv 2505.16932).

    Every step is the odd quintic nearest to 1 on the interval that the steps before it lead to:
    the greedy choice, which that paper proves to be the best composition.
    """
    low, high = floor, 1.0
    steps = []
    while max(1 - low, high - 1) > accuracy:
        a, b, c = _nearest_quintic(low, high)
        steps.append((a, b, c))
        low, high = low * (a + b * low**2 + c * low**4), 0.0
        high = 2 - low
    return tuple(steps)


def _nearest_quintic(low: float, high: float) -> tuple[float, float, float]:
    """Return the odd quintic nearest to 1 on [low, high], by Remez exchange."""
    if high - low < 1e-3:
        return 15 / 8, -10 / 8, 3 / 8  # the limit: value 1 and no slope or curvature at 1
    inner = [low + (high - low) / 3, low + 2 * (high - low) / 3]
    for _ in range(50):
        points = torch.tensor([low, *inner, high], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, _ = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        # Extrema of a x + b x³ + c x⁵ between the ends.
        middle, spread = -3 * b / (10 * c), math.sqrt(9 * b * b - 20 * a * c) / (10 * c)
        inner = [math.sqrt(middle - spread), math.sqrt(middle + spread)]
    return a, b, c


@cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for products in bfloat16: twice float32's pace or more.

    Told by what the device is and not by a measurement, which would make a run's numbers depend on
    what else was at work. False where torch is too old to tell.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in BFLOAT16_INSTRUCTIONS)
