"""Inputs at the edge: empty, zero, thin, rank-deficient, tied, huge, tiny, not finite."""

import warnings

import pytest
import torch

from isoloco_flwr.merging import METHODS, dare, iso_cts, merge, ties, tsv, worker_generator

pytestmark = pytest.mark.filterwarnings("ignore:iso_cts of:UserWarning")

every_method = pytest.mark.parametrize("method", METHODS)
POLARS = ["svd", "gram", "newton_schulz", "polar_express", "rational3", "rational1", "fast"]
VARIANTS = [(method, {}) for method in METHODS] + [("iso_c", {"polar": p}) for p in POLARS[1:]]
every_variant = pytest.mark.parametrize(("method", "options"), VARIANTS, ids=str)


def random_stack(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(method, stack, **options):
    if method == "dare":
        options["generator"] = [worker_generator(0, 1, r, "w") for r in range(len(stack))]
    return merge(method, stack, **options)


@every_variant
@pytest.mark.parametrize(
    "shape", [(5,), (), (4, 4), (1, 6), (6, 1), (300, 4), (300, 300), (2, 3, 4)], ids=str
)
def test_zero_stays_zero(method, options, shape):
    assert torch.equal(run(method, torch.zeros(3, *shape), **options), torch.zeros(shape))


@every_variant
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0)], ids=str)
def test_empty_stays_empty(method, options, shape):
    assert run(method, torch.zeros(3, *shape), **options).shape == shape


@every_variant
@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1)], ids=str)
def test_a_vector_as_a_matrix_is_one_direction(method, options, shape):
    stack = random_stack(1, *shape)
    merged = run(method, stack, **options)
    if method == "ties":
        kept = stack[0].flatten().abs().sort(descending=True).values[: max(1, int(0.9 * 7))]
        expected = torch.where(stack[0].abs() >= kept[-1], stack[0], 0)
    elif method == "dare":
        expected = torch.where(merged != 0, stack[0] / 0.9, 0)
    elif options.get("polar") in ("newton_schulz", "rational1", "rational3"):
        # One singular value: the direction is exact, its size as near as the method gets.
        expected = stack[0] * (merged.norm() / stack[0].norm())
        assert 0.4 < merged.norm() / stack[0].norm() < 1.3
    else:
        expected = stack[0]
    torch.testing.assert_close(merged, expected)


# Not tsv, which is a sum, and not dare, where every worker has a choice of its own.
@pytest.mark.parametrize("method", ["mean", "iso_c", "iso_cts", "ties"])
def test_one_worker_agrees_with_many_of_the_same(method):
    delta = random_stack(6, 6, seed=2, dtype=torch.float64)
    torch.testing.assert_close(
        merge(method, delta.expand(4, 6, 6)), merge(method, delta[None]), rtol=1e-9, atol=1e-9
    )


def test_one_worker_of_tsv_is_its_pseudo_gradient():
    delta = random_stack(1, 5, 4)
    assert torch.equal(tsv(delta), delta[0])
    assert torch.equal(tsv(delta, singular_ratio=0.5), delta[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_workers_of_tsv_give_the_truncated_pseudo_gradient(dtype):
    # Shared directions count once, and directions that no worker has stay out.
    delta = random_stack(8, 8, seed=3, dtype=dtype)
    u, s, vh = torch.linalg.svd(delta)
    expected = (u[:, :2] * s[:2]) @ vh[:2]
    torch.testing.assert_close(tsv(delta.expand(4, 8, 8)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_more_workers_than_directions_of_iso_cts_warn_once_and_are_iso_c(fraction):
    stack = random_stack(128, 64, 64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merged = iso_cts(stack, fraction)
    assert [str(w.message).endswith("this is Iso-C") for w in caught] == [True]
    assert torch.equal(merged, merge("iso_c", stack))


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("workers", [1, 2, 5, 8])
def test_iso_cts_with_directions_to_spare_does_not_warn(fraction, workers):
    stack = random_stack(workers, 64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = torch.linalg.svdvals(iso_cts(stack, fraction))
    torch.testing.assert_close(values, values.mean().expand_as(values), rtol=1e-3, atol=0)


@every_variant
@pytest.mark.parametrize("shape", [(12, 9), (9, 12), (300, 280)], ids=str)
def test_rank_deficient_input_stays_finite_and_bounded(method, options, shape):
    m, n = shape
    low_rank = random_stack(3, m, 2) @ random_stack(3, 2, n, seed=1)
    merged = run(method, low_rank, **options)
    assert torch.isfinite(merged).all()
    assert merged.norm() <= 2 * low_rank.norm(dim=(1, 2)).sum()


@every_variant
@pytest.mark.parametrize("exponent", [-98, 98])
def test_huge_and_tiny_values(method, options, exponent):
    # 2^±98 is 3e±29: squares leave the range of float32.
    stack = random_stack(3, 8, 6)
    want = run(method, stack, **options)
    got = torch.ldexp(
        run(method, torch.ldexp(stack, torch.tensor(exponent)), **options), torch.tensor(-exponent)
    )
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@every_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(method, dtype):
    stack = random_stack(4, 6, 5, dtype=dtype)
    want = run(method, stack.float()).to(dtype)
    assert torch.equal(run(method, stack), want)


@every_method
def test_half_precision_sums_beyond_its_range(method):
    # 4 · 40000 is over float16's largest number: only float32 inside can average it.
    stack = torch.full((4, 1, 1), 4e4, dtype=torch.float16)
    merged = run(method, stack, **({"sparsity": 0.0} if method in ("ties", "dare") else {}))
    torch.testing.assert_close(merged, stack[0])


@every_method
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape", [(4, 4), (3,)], ids=str)
def test_a_value_that_is_not_finite_is_refused(method, value, shape):
    stack = torch.ones(3, *shape)
    stack[1].view(-1)[2] = value
    with pytest.raises(ValueError, match=rf"^{method}: values of worker\(s\) \[1\] are not finite"):
        merge(method, stack)


@every_method
def test_no_worker_is_refused(method):
    with pytest.raises(ValueError, match=rf"^{method}: deltas of shape \(0, 3, 3\)"):
        merge(method, torch.zeros(0, 3, 3))
    with pytest.raises(ValueError, match=rf"^{method}: deltas of shape \(\)"):
        merge(method, torch.tensor(1.0))


@every_method
def test_integers_are_refused(method):
    with pytest.raises(ValueError, match=rf"^{method}: deltas of torch.int64"):
        merge(method, torch.ones(2, 3, dtype=torch.int64))


# --- TIES and DARE ------------------------------------------------------------------------------


def test_ties_of_signs_that_cancel_is_zero():
    stack = torch.tensor([[0.1, 1.0], [0.2, 1.0], [-0.3, 1.0]])
    stack[2, 0] = -(stack[0, 0].double() + stack[1, 0].double()).float()
    exact = torch.tensor([[1.0, 3.0], [-1.0, 1.0]])
    assert torch.equal(ties(exact, sparsity=0.0), torch.tensor([0.0, 2.0]))
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        torch.testing.assert_close(ties(stack[order], 0.0), ties(stack, 0.0))


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_ties_keeps_exactly_as_many_when_magnitudes_tie(sparsity, size):
    merged = ties(torch.ones(1, size), sparsity)
    kept = max(1, int((1 - sparsity) * size))
    assert torch.equal(merged, (torch.arange(size) < kept).float())


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.95])
def test_dare_keeps_exactly_as_many_and_rescales(sparsity):
    merged = dare(torch.ones(1, 40, 25), sparsity, worker_generator(3, 1, 0, "w"))
    kept = max(1, int((1 - sparsity) * 1000))
    values, counts = merged.unique(return_counts=True)
    assert counts[-1] == kept
    torch.testing.assert_close(values[-1].item(), 1 / (1 - sparsity), rtol=1e-6, atol=0)
    assert kept == 1000 or values[0] == 0


def test_dare_is_a_pure_function_of_seed_round_worker_and_name():
    stack = torch.ones(1, 500)

    def mask(*key):
        return dare(stack, 0.5, worker_generator(*key))

    key = (7, 3, 1, "layers.0.weight")
    torch.rand(11)  # whatever else was drawn
    assert torch.equal(mask(*key), mask(*key))
    for other in [
        (8, 3, 1, "layers.0.weight"),
        (7, 4, 1, "layers.0.weight"),
        (7, 3, 2, "layers.0.weight"),
        (7, 3, 1, "layers.1.weight"),
        (7, 1, 3, "layers.0.weight"),
    ]:
        # Independent choices of a half agree on about a half.
        assert 0.4 < (mask(*other) == mask(*key)).float().mean() < 0.6


def test_dare_of_a_worker_does_not_depend_on_the_others():
    stack = torch.zeros(2, 100)
    stack[1] = 1
    both = dare(stack, 0.3, [worker_generator(0, 1, 0, "w"), worker_generator(0, 1, 1, "w")])
    alone = dare(stack[1:], 0.3, [worker_generator(0, 1, 1, "w")])
    assert torch.equal(both * 2, alone)


def test_dare_is_unbiased():
    delta = random_stack(50, seed=5)
    generators = [worker_generator(0, r, 0, "w") for r in range(3000)]
    torch.testing.assert_close(
        dare(delta.expand(3000, 50), 0.4, generators), delta, rtol=0.1, atol=0.02
    )


def test_dare_wants_a_generator_for_each_worker():
    with pytest.raises(ValueError, match="dare: 1 generators for 2 workers"):
        dare(torch.ones(2, 3), generator=[torch.Generator()])
