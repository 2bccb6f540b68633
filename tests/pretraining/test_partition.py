"""Which documents whom: disjoint, whole, the same from the same seed, and as unlike as asked."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from isoloco_flwr.pretraining.partition import PARTITIONERS, partition_documents


def partition(partitioner, lengths, labels, *, num_workers=3, alpha=0.5, seed=0):
    names = [f"label {number}" for number in range(max(labels, default=0) + 1)]
    return partition_documents(
        np.array(lengths, np.int64),
        np.array(labels, np.int32),
        names,
        partitioner=partitioner,
        num_workers=num_workers,
        alpha=alpha,
        seed=seed,
    )


def of_labels(number, count=200):
    """So many labels in no order, each of them there, and documents of many lengths."""
    draw = np.random.default_rng(number)
    labels = np.concatenate((np.arange(number), draw.integers(0, number, count - number)))
    return draw.integers(1, 900, count), draw.permutation(labels)


@pytest.mark.parametrize("partitioner", ["dirichlet", "label", "size"])
@given(labels=st.integers(1, 12), num_workers=st.integers(1, 12), seed=st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_each_document_has_one_worker_and_each_worker_a_document(
    partitioner, labels, num_workers, seed
):
    assume(partitioner != "label" or num_workers <= labels)
    arguments = {"num_workers": num_workers, "alpha": 5.0, "seed": seed}
    workers = partition(partitioner, *of_labels(labels), **arguments)
    assert len(workers) == num_workers
    assert all(own.dtype == np.int64 and len(own) for own in workers)
    assert all((np.diff(own) > 0).all() for own in workers)
    assert sorted(np.concatenate(workers)) == list(range(200))
    np.random.seed(3)  # noqa: NPY002 - the global state must not matter
    again = partition(partitioner, *of_labels(labels), **arguments)
    assert all(np.array_equal(*pair) for pair in zip(workers, again, strict=True))


@pytest.mark.parametrize("partitioner", ["dirichlet", "size"])
def test_the_seed_decides_who_gets_what(partitioner):
    lengths, labels = of_labels(4)
    first, other = (partition(partitioner, lengths, labels, seed=seed) for seed in (0, 1))
    assert not np.array_equal(first[0], other[0])


def test_a_small_alpha_makes_workers_differ_and_a_large_one_makes_them_alike():
    lengths, labels = of_labels(5, count=2000)

    def unlikeness(alpha):
        shares = [
            np.bincount(labels[own], minlength=5) / len(own)
            for own in partition("dirichlet", lengths, labels, num_workers=4, alpha=alpha)
        ]
        return np.std(shares, axis=0).mean()

    assert unlikeness(0.1) > 0.15
    assert unlikeness(1000.0) < 0.02


def test_of_one_label_a_worker_gets_documents_from_all_over_the_corpus():
    # Documents lie in the order of their making; the label alone is to make workers differ.
    own = partition("dirichlet", [1] * 1000, [0] * 1000, num_workers=2, alpha=100.0)[0]
    assert own[0] < 50
    assert own[-1] > 950


def test_workers_of_unequal_size_grow_linearly():
    workers = partition("size", *of_labels(3, count=500), num_workers=4)
    assert [len(own) for own in workers] == [50, 100, 150, 200]


@given(
    tokens=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    num_workers=st.integers(1, 8),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_labels_stay_whole_and_neighbours_and_the_largest_worker_is_as_small_as_can_be(
    tokens, num_workers, seed
):
    assume(num_workers <= len(tokens))
    # Each label's tokens in up to three documents, all documents in no order.
    documents = [
        (length, label)
        for label, total in enumerate(tokens)
        for length in np.diff(sorted({0, total, total // 3, total // 2}))
    ]
    np.random.default_rng(seed).shuffle(documents)
    lengths, labels = np.array(documents).T
    workers = partition("label", lengths, labels, num_workers=num_workers)
    ranges = [set(labels[own].tolist()) for own in workers]
    assert list(itertools.chain(*map(sorted, ranges))) == list(range(len(tokens)))

    def largest(cuts):
        ends = (0, *cuts, len(tokens))
        return max(sum(tokens[begin:end]) for begin, end in itertools.pairwise(ends))

    best = min(
        largest(cuts) for cuts in itertools.combinations(range(1, len(tokens)), num_workers - 1)
    )
    assert max(lengths[own].sum() for own in workers) == best


def test_below_the_largest_worker_the_others_are_near_one_another():
    # 9 must stand alone; the six others could also go 5 and 1.
    workers = partition("label", [9, 1, 1, 1, 1, 1, 1], range(7))
    assert [own.tolist() for own in workers] == [[0], [1, 2, 3], [4, 5, 6]]


def test_labels_without_a_document_take_no_worker():
    workers = partition("label", [5, 5, 5], [1, 7, 4])
    assert [own.tolist() for own in workers] == [[0], [2], [1]]


def test_naturally_all_documents_are_the_nodes_own():
    workers = partition("natural", [5, 5, 5, 5], [0, 0, 0, 0], num_workers=2)
    assert [own.tolist() for own in workers] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("partitioner", "labels", "num_workers", "what"),
    [
        ("dirichlet", [0] * 30, 20, "data.dirichlet-alpha"),
        ("label", [0, 1] * 15, 3, "2 labels"),
        ("size", [0] * 30, 20, "more than 210 documents"),
        ("dirichlet", [0, 0], 3, "more documents"),
        ("label", [0, 1], 3, "more documents"),
        ("size", [0, 0], 3, "more documents"),
    ],
)
def test_a_worker_without_a_document_is_named_and_what_to_change(
    partitioner, labels, num_workers, what
):
    with pytest.raises(ValueError, match=rf"'{partitioner}': worker \d+ of {num_workers} .*{what}"):
        partition(partitioner, [9] * len(labels), labels, num_workers=num_workers, alpha=0.05)


def test_the_worker_that_is_named_is_one_that_gets_nothing():
    with pytest.raises(ValueError, match="worker 2 of 3 gets none of the 30 documents"):
        partition("label", [9] * 30, [0, 1] * 15)


@pytest.mark.parametrize("partitioner", ["dirichlet", "label"])
def test_labels_are_asked_for(partitioner):
    with pytest.raises(ValueError, match=rf"'{partitioner}' .* data\.label-column"):
        partition_documents(
            np.ones(9, np.int64),
            None,
            (),
            partitioner=partitioner,
            num_workers=3,
            alpha=0.5,
            seed=0,
        )


def test_an_unknown_partitioner_is_named():
    with pytest.raises(
        ValueError, match="'era': allowed is one of iid, " + ", ".join(PARTITIONERS)
    ):
        partition("era", [1, 1, 1], [0, 0, 0])
