"""Polar factors and isotropic matrices: every method to its stated accuracy, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco_flwr import polar as polar_module
from isoloco_flwr.polar import METHODS, express_steps, fast_method, isotropic, polar

MILD, STEEP = 1.5, 3.5
"""Decades over which the singular values decay."""

POLAR_ERROR = {
    # Relative Frobenius error of the polar factor of a float32 matrix: mild, steep.
    "svd": (1e-5, 2e-4),
    "gram": (1e-5, 2e-4),
    "newton_schulz": (0.22, 0.65),
    "polar_express": (1e-4, 1e-3),
    "rational3": (0.06, 0.07),
    "rational1": (0.15, 0.60),
    "fast": (0.15, 0.60),
}
SCALE_ERROR = {
    # Relative error of the mean singular value.
    "svd": 1e-5,
    "gram": 1e-5,
    "newton_schulz": 0.16,
    "polar_express": 1e-4,
    "rational3": 0.02,
    "rational1": 0.02,
    "fast": 0.02,
}
SHAPES = [(160, 160), (300, 280), (700, 150), (150, 700), (280, 300)]


def decaying(m, n, decades, seed=0):
    """Return a float32 matrix, its polar factor and its mean singular value (float64)."""
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    u = torch.linalg.qr(torch.randn(m, k, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64))[0]
    s = torch.logspace(0, -decades, k, dtype=torch.float64)
    return ((u * s) @ v.mT).float(), u @ v.mT, s.mean().item()


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def scale_error(matrix, method, mean_value):
    """Return the relative error of the scale of the isotropic matrix."""
    scaled, factor = isotropic(matrix, method).double(), polar(matrix, method).double()
    scale = (scaled * factor).sum() / (factor * factor).sum()
    # One factor for all directions.
    assert relative_error(scaled, scale * factor) < 1e-3
    return abs(scale / mean_value - 1)


def of_low_rank(m, n, rank=5):
    """Return bases of the column space and of the row space of a matrix (m, n)."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(m, rank, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(n, rank, generator=generator))[0]
    return left, right


def outside(factor, left, right):
    """Return what a polar factor has outside of the column space and the row space."""
    return factor - left @ (left.mT @ factor @ right) @ right.mT


@pytest.fixture(scope="module", autouse=True)
def float32_on_every_processor():
    """Let processors with and without instructions for bfloat16 do the same here."""
    on_device = polar_module.multiplies_bfloat16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            polar_module,
            "multiplies_bfloat16",
            lambda device: device.type == "cuda" and on_device(device),
        )
        yield


@pytest.mark.parametrize("decades", [MILD, STEEP])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_polar_factor_is_as_near_as_stated(method, shape, decades):
    matrix, factor, _ = decaying(*shape, decades)
    assert relative_error(polar(matrix, method), factor) < POLAR_ERROR[method][decades == STEEP]


@pytest.mark.parametrize("decades", [MILD, STEEP])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_nuclear_scale_is_as_near_as_stated(method, shape, decades):
    matrix, _, mean_value = decaying(*shape, decades)
    assert scale_error(matrix, method, mean_value) < SCALE_ERROR[method]


@pytest.mark.parametrize("method", ["rational1", "rational3"])
@pytest.mark.parametrize("top", ["white", "flat", 0.5, 1.0, 2.0, 2.5, 3.0])
def test_scale_of_the_rational_methods_over_many_spectra(method, top):
    if top == "white":
        matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    elif top == "flat":
        matrix = torch.linalg.qr(torch.randn(256, 256, generator=torch.Generator().manual_seed(1)))[
            0
        ]
    else:
        matrix, _, _ = decaying(256, 256, top)
    exact = torch.linalg.svdvals(matrix.double()).mean()
    assert scale_error(matrix, method, exact) < 0.03


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (300, 20), (300, 260)], ids=str)
def test_rms_scale_is_the_frobenius_norm_over_root_k(method, shape):
    matrix, _, _ = decaying(*shape, MILD)
    scaled, factor = isotropic(matrix, method, "rms"), polar(matrix, method)
    expected = matrix.norm() / min(shape) ** 0.5
    torch.testing.assert_close(scaled, expected * factor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("decades", [MILD, STEEP])
def test_gram_of_float64_is_exact_beyond_float32(decades):
    matrix = decaying(50, 40, decades)[0].double()
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    assert relative_error(polar(matrix, "gram"), u @ vh) < 1e-8
    assert relative_error(polar(matrix, "polar_express"), u @ vh) < 1e-3


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20, deadline=None)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    m=st.integers(1, 9),
    n=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_batch_is_its_matrices(method, batch, m, n, seed):
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(*batch, m, n, generator=generator, dtype=torch.float64)
    before = matrices.clone()
    together = isotropic(matrices, method)
    singly = torch.stack([isotropic(one, method) for one in matrices.reshape(-1, m, n)])
    torch.testing.assert_close(together, singly.reshape(matrices.shape), rtol=1e-6, atol=1e-9)
    assert torch.equal(matrices, before)


def test_a_batch_of_large_matrices():
    matrices = torch.stack([decaying(300, 280, MILD, seed)[0] for seed in range(2)])
    for method in METHODS:
        singly = torch.stack([isotropic(one, method) for one in matrices])
        torch.testing.assert_close(isotropic(matrices, method), singly)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_with_zero_huge_and_tiny_matrices(method):
    one = decaying(12, 8, MILD)[0]
    batch = torch.stack([one, torch.zeros_like(one), one * 2.0**98, one * 2.0**-98])
    plain, zero, huge, tiny = isotropic(batch, method)
    torch.testing.assert_close(plain, isotropic(one, method))
    assert torch.equal(zero, torch.zeros_like(one))
    torch.testing.assert_close(huge / 2.0**98, plain, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(tiny * 2.0**98, plain, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(polar(batch, method)[3], polar(one, method), rtol=1e-4, atol=1e-6)
    assert torch.equal(polar(batch, method)[1], torch.zeros_like(one))


@pytest.mark.parametrize("method", [m for m in METHODS if m != "svd"])
@pytest.mark.parametrize("shape", [(40, 40), (200, 30), (30, 200), (300, 270)], ids=str)
def test_missing_directions_carry_nothing(method, shape):
    left, right = of_low_rank(*shape)
    assert outside(polar(left @ right.mT, method), left, right).norm() < 1e-2


@pytest.mark.parametrize("decades", [MILD, STEEP])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if min(shape) >= 256], ids=str)
def test_newton_schulz_in_bfloat16(shape, decades, monkeypatch):
    monkeypatch.setattr(polar_module, "multiplies_bfloat16", lambda device: True)
    matrix, factor, mean_value = decaying(*shape, decades)
    error = relative_error(polar(matrix, "newton_schulz"), factor)
    assert error < POLAR_ERROR["newton_schulz"][decades == STEEP]
    assert scale_error(matrix, "newton_schulz", mean_value) < 0.17
    # Directions that are missing stay missing, as far as rounding does not turn the others.
    left, right = of_low_rank(*shape)
    rest = outside(polar(left @ right.mT, "newton_schulz"), left, right)
    assert torch.linalg.matrix_norm(rest, 2) < 2e-2


def test_bfloat16_changes_newton_schulz_from_256_columns_on(monkeypatch):
    def both(side):
        matrix = decaying(side, side, MILD)[0]
        for bfloat16 in (False, True):
            monkeypatch.setattr(polar_module, "multiplies_bfloat16", lambda device: bfloat16)  # noqa: B023
            yield polar(matrix, "newton_schulz")

    assert torch.equal(*both(255))
    assert not torch.equal(*both(256))


def test_svd_completes_missing_directions():
    factor = polar(torch.ones(6, 6), "svd")
    torch.testing.assert_close(factor @ factor.mT, torch.eye(6), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_stays(method, dtype):
    matrix = decaying(20, 30, MILD)[0].to(dtype)
    assert polar(matrix, method).dtype == isotropic(matrix, method).dtype == dtype
    want = isotropic(matrix.float(), method).to(dtype)
    torch.testing.assert_close(isotropic(matrix, method), want, rtol=2e-2, atol=1e-3)


def test_fast_is_one_of_the_others():
    cpu = torch.device("cpu")
    assert fast_method(1024, 1024, torch.float32, cpu) == "rational1"
    assert fast_method(32000, 64, torch.float32, cpu) == "gram"
    assert fast_method(1024, 1024, torch.float64, cpu) == "gram"
    assert fast_method(1024, 1024, torch.float32, torch.device("cuda")) == "polar_express"


@pytest.mark.parametrize("shape", [(130, 130), (40, 40)], ids=str)
def test_fast_gives_what_its_choice_gives(shape):
    matrix = decaying(*shape, MILD)[0]
    choice = fast_method(*shape, matrix.dtype, matrix.device)
    assert torch.equal(isotropic(matrix, "fast"), isotropic(matrix, choice))


@settings(max_examples=30, deadline=None)
@given(floor=st.floats(1e-6, 0.9), accuracy=st.floats(1e-12, 0.1))
def test_express_steps_reach_their_accuracy(floor, accuracy):
    x = torch.logspace(torch.tensor(floor).log10().item(), 0, 2000, dtype=torch.float64)
    x = x.clamp(floor, 1.0)
    for a, b, c in express_steps(floor, accuracy):
        x = x * (a + b * x**2 + c * x**4)
    assert (x - 1).abs().max() <= 1.01 * accuracy + 1e-12


@pytest.mark.parametrize("name", ["rational1", "rational3"])
def test_the_rationals_are_the_least_squares_fits_they_are_said_to_be(name):
    (a, b), poles = polar_module.RATIONALS[name]
    x = torch.logspace({"rational1": -2.0, "rational3": -3.5}[name], 0, 4000, dtype=torch.float64)
    basis = torch.stack([x, x**3, *(x * t / (x**2 + t) for t, _ in poles)], dim=1)
    given_weights = torch.tensor([a, b, *(r / t for t, r in poles)], dtype=torch.float64)
    best = torch.linalg.lstsq(basis, torch.ones(4000, 1, dtype=torch.float64)).solution
    given_error = (basis @ given_weights - 1).square().mean().sqrt()
    best_error = (basis @ best.squeeze(1) - 1).square().mean().sqrt()
    assert given_error < 1.0001 * best_error


def test_inverse_by_halves():
    generator = torch.Generator().manual_seed(0)
    for n in (1, 5, 129, 300, 513):
        x = torch.randn(2 * n, n, generator=generator)
        g = x.mT @ x / n + 0.1 * torch.eye(n)
        inverse = g.clone()
        polar_module._invert(inverse)
        torch.testing.assert_close(inverse @ g, torch.eye(n), rtol=0, atol=1e-3)


@pytest.mark.parametrize("function", [polar, isotropic])
def test_errors_name_the_value_and_what_is_allowed(function):
    with pytest.raises(ValueError, match="method 'qr': allowed are svd, gram, newton_schulz"):
        function(torch.ones(2, 2), "qr")
    with pytest.raises(ValueError, match=r"matrix of shape \(3,\): allowed is \(..., m, n\)"):
        function(torch.ones(3))
    with pytest.raises(ValueError, match=r"matrix of torch.int64: allowed is a floating-point"):
        function(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="scale 'mean': allowed are nuclear, rms"):
        isotropic(torch.ones(2, 2), scale="mean")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_as_near_to_the_exact_factor():
    for shape in SHAPES:
        matrix, factor, mean_value = decaying(*shape, MILD)
        for method in METHODS:
            got = polar(matrix.cuda(), method).cpu()
            assert relative_error(got, factor) < max(POLAR_ERROR[method][0], 0.02)
            scaled = isotropic(matrix.cuda(), method).cpu().double()
            scale = (scaled * got).sum() / (got * got).sum()
            assert abs(scale / mean_value - 1) < max(SCALE_ERROR[method], 0.02)
