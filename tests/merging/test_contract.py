"""What every merge in the registry promises, whatever the shape, dtype and number of workers."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from isoloco_flwr.merging import METHODS, merge, worker_generator

pytestmark = pytest.mark.filterwarnings("ignore:iso_cts of:UserWarning")

MANY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
VARIANTS = [
    *((method, {}) for method in METHODS),
    *(("iso_c", {"polar": polar}) for polar in ("gram", "rational3", "fast")),
    ("iso_c", {"scale": "rms"}),
    ("iso_cts", {"common_space_fraction": 0.3}),
    ("tsv", {"singular_ratio": 0.5}),
    ("tsv", {"decorrelate": False}),
    ("ties", {"sparsity": 0.6}),
    ("dare", {"sparsity": 0.6}),
]
all_variants = pytest.mark.parametrize(
    ("method", "options"), VARIANTS, ids=[f"{m}-{o}" for m, o in VARIANTS]
)
shapes = st.one_of(
    st.tuples(st.integers(1, 12)),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
)
workers = st.integers(1, 6)
seeds = st.integers(0, 2**32 - 1)


def random_stack(count, shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype)


def run(method, options, stack, order=None):
    """Merge, with a generator a worker where the merge draws."""
    if method == "dare":
        order = range(len(stack)) if order is None else order
        generators = [worker_generator(0, 1, worker, "w") for worker in order]
        options = options | {"generator": generators}
    return merge(method, stack, **options)


def assert_near(got, want, tolerance):
    """Compare relative to the size of the whole result."""
    size = max(want.double().norm().item(), 1e-12)
    assert (got.double() - want.double()).norm().item() <= tolerance * size


@all_variants
@MANY
@given(shape=shapes, count=workers, seed=seeds, data=st.data())
def test_order_of_the_workers_changes_nothing(method, options, shape, count, seed, data):
    order = data.draw(st.permutations(range(count)))
    stack = random_stack(count, shape, seed, torch.float64)
    got = run(method, options, stack[order], order)
    assert_near(got, run(method, options, stack), 1e-6)


@all_variants
@MANY
@given(shape=shapes, count=workers, seed=seeds, exponent=st.integers(-100, 100))
def test_scaling_commutes(method, options, shape, count, seed, exponent):
    stack = random_stack(count, shape, seed, torch.float64)
    got = run(method, options, stack * 2.0**exponent) / 2.0**exponent
    assert_near(got, run(method, options, stack), 1e-6)


@all_variants
@MANY
@given(shape=shapes, count=workers, seed=seeds)
def test_sign_commutes(method, options, shape, count, seed):
    stack = random_stack(count, shape, seed, torch.float64)
    assert_near(run(method, options, -stack), -run(method, options, stack), 1e-6)


@all_variants
@MANY
@given(
    shape=shapes,
    count=workers,
    seed=seeds,
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_shape_dtype_device_stay_and_the_input_is_untouched(
    method, options, shape, count, seed, dtype
):
    stack = random_stack(count, shape, seed, dtype)
    before = stack.clone()
    merged = run(method, options, stack)
    assert (merged.shape, merged.dtype, merged.device) == (stack.shape[1:], dtype, stack.device)
    assert merged.is_contiguous()
    assert torch.isfinite(merged).all()
    assert torch.equal(stack, before)


@all_variants
def test_result_shares_no_memory_with_the_input(method, options):
    for shape in [(1, 4, 4), (1, 5), (2, 4, 4)]:
        stack = torch.ones(shape, dtype=torch.float64)
        merged = run(method, options, stack)
        merged.fill_(7)
        assert torch.equal(stack, torch.ones_like(stack))


@all_variants
def test_no_gradient_is_recorded(method, options):
    stack = random_stack(3, (4, 5), 0).requires_grad_()
    assert not run(method, options, stack).requires_grad


@all_variants
def test_strided_input(method, options):
    stack = random_stack(3, (6, 4), 1, torch.float64)
    view = stack.repeat_interleave(2, dim=2)[:, :, ::2]
    assert not view.is_contiguous()
    assert_near(run(method, options, view), run(method, options, stack), 1e-6)
    assert_near(run(method, options, stack.mT), run(method, options, stack.mT.contiguous()), 1e-6)


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.matrices_only])
@MANY
@given(
    shape=st.one_of(st.tuples(st.integers(1, 9)), st.tuples(*[st.integers(1, 3)] * 3)), seed=seeds
)
def test_a_parameter_that_is_no_matrix_is_averaged(method, shape, seed):
    stack = random_stack(3, shape, seed, torch.float64)
    torch.testing.assert_close(merge(method, stack), stack.mean(0))


ISO_C_METHODS = ["svd", "gram", "newton_schulz", "polar_express", "rational3", "rational1", "fast"]


@pytest.mark.parametrize("polar", ISO_C_METHODS)
@MANY
@given(m=st.integers(1, 10), n=st.integers(1, 10), count=workers, seed=seeds)
def test_iso_c_commutes_with_transposition(polar, m, n, count, seed):
    # The rationals estimate the largest singular value from the small side: a square has two.
    assume(m != n or not polar.startswith("rational"))
    stack = random_stack(count, (m, n), seed, torch.float64)
    got = merge("iso_c", stack.mT, polar=polar).mT
    assert_near(got, merge("iso_c", stack, polar=polar), 1e-6)


@pytest.mark.parametrize("polar", ISO_C_METHODS[:4])
@MANY
@given(m=st.integers(1, 10), n=st.integers(1, 10), seed=seeds)
def test_iso_c_commutes_with_orthogonal_maps(polar, m, n, seed):
    stack = random_stack(2, (m, n), seed, torch.float64)
    values = torch.linalg.svdvals(stack.mean(0))
    assume(values[-1] > 1e-3 * values[0])
    left = torch.linalg.qr(random_stack(1, (m, m), seed + 1, torch.float64)[0])[0]
    right = torch.linalg.qr(random_stack(1, (n, n), seed + 2, torch.float64)[0])[0]
    got = merge("iso_c", left @ stack @ right, polar=polar)
    assert_near(got, left @ merge("iso_c", stack, polar=polar) @ right, 1e-6)


@pytest.mark.parametrize("polar", ["svd", "gram"])
@MANY
@given(m=st.integers(1, 10), n=st.integers(1, 10), count=workers, seed=seeds)
def test_iso_c_keeps_the_nuclear_norm_and_levels_the_spectrum(polar, m, n, count, seed):
    stack = random_stack(count, (m, n), seed, torch.float64)
    values = torch.linalg.svdvals(stack.mean(0))
    assume(values[-1] > 1e-4 * values[0])
    merged = torch.linalg.svdvals(merge("iso_c", stack, polar=polar))
    torch.testing.assert_close(merged.sum(), values.sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(merged, values.mean().expand_as(merged), rtol=1e-6, atol=0)
