"""The exact merges on random stacks against the independent NumPy reference."""

import numpy as np
import pytest
import torch
from reference import merging as reference

from isoloco_flwr.merging import merge

SHAPES = [
    (1, 5, 5),
    (2, 8, 5),
    (3, 5, 8),
    (4, 12, 12),
    (3, 40, 6),
    (3, 6, 40),
    (5, 7),
    (2, 3, 4, 2),
]
CASES = [
    ("mean", {}),
    ("iso_c", {}),
    ("iso_cts", {"common_space_fraction": 0.0}),
    ("iso_cts", {"common_space_fraction": 0.5}),
    ("iso_cts", {}),
    ("tsv", {}),
    ("tsv", {"singular_ratio": 0.4}),
    ("tsv", {"decorrelate": False}),
    ("ties", {}),
    ("ties", {"sparsity": 0.7}),
]


def random_stack(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def relative_difference(got, want):
    return np.linalg.norm(np.ravel(got - want)) / np.linalg.norm(np.ravel(want))


@pytest.mark.filterwarnings("ignore:iso_cts of:UserWarning")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("method", "options"), CASES, ids=str)
def test_float64_agrees_with_the_reference(method, options, shape):
    stack = random_stack(*shape)
    got = merge(method, torch.from_numpy(stack), **options).numpy()
    assert relative_difference(got, reference.MERGES[method](stack, **options)) < 1e-9


@pytest.mark.parametrize(
    "shape", [(4, 96, 96), (4, 200, 80), (4, 80, 200), (4, 400, 60), (4, 60, 400)], ids=str
)
@pytest.mark.parametrize(("method", "options"), [("tsv", {}), ("iso_cts", {})], ids=str)
def test_float32_without_full_svds_is_within_a_thousandth(method, options, shape):
    _, m, n = shape
    decay = 10 ** np.linspace(0, -1.5, min(m, n))
    stack = np.zeros(shape)
    for seed, delta in enumerate(stack):
        u, _, vh = np.linalg.svd(random_stack(m, n, seed=seed), full_matrices=False)
        delta += u * decay @ vh + random_stack(m, n, seed=99) / (m * n) ** 0.5
    got = merge(method, torch.from_numpy(stack).float(), **options).double().numpy()
    assert relative_difference(got, reference.MERGES[method](stack, **options)) < 1e-3
