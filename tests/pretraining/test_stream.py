"""Batches: disjoint between workers, and a pure function of seed, worker and step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isoloco_flwr.pretraining.stream import epochs_seen, sequences_per_worker, worker_batch

CONTEXT = 4


def batch(step, *, num_tokens=401, seed=0, worker=0, num_workers=3, batch_size=5):
    return worker_batch(
        np.arange(num_tokens, dtype=np.uint16),
        context=CONTEXT,
        seed=seed,
        worker=worker,
        num_workers=num_workers,
        step=step,
        batch_size=batch_size,
    )


def starts(batches):
    return [int(row[0]) for rows in batches for row in rows]


@given(num_tokens=st.integers(30, 600), num_workers=st.integers(1, 7), batch_size=st.integers(1, 9))
def test_an_epoch_reads_each_own_sequence_once_and_nobody_elses(
    num_tokens, num_workers, batch_size
):
    own = sequences_per_worker(num_tokens, context=CONTEXT, num_workers=num_workers)
    seen = []
    for worker in range(num_workers):
        steps = -(-own // batch_size)
        read = starts(
            batch(
                step,
                num_tokens=num_tokens,
                worker=worker,
                num_workers=num_workers,
                batch_size=batch_size,
            )
            for step in range(steps)
        )[:own]
        assert len(set(read)) == own
        seen += read
    assert len(set(seen)) == own * num_workers
    assert all(start % CONTEXT == 0 for start in seen)
    # Fewer sequences are left over than there are workers.
    assert (num_tokens - 1) // CONTEXT - len(seen) < num_workers


def test_targets_are_the_inputs_one_further():
    rows = batch(0)
    assert rows.dtype == torch.int64
    assert rows.shape == (5, CONTEXT + 1)
    assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)


def test_a_batch_depends_on_nothing_but_its_arguments():
    first = batch(7)
    for other in range(20):
        batch(other, seed=other, worker=other % 3)
    np.random.seed(3)  # noqa: NPY002 - the global state must not matter
    torch.manual_seed(3)
    assert torch.equal(batch(7), first)


@pytest.mark.parametrize("change", [{"seed": 1}, {"worker": 1}])
def test_seed_and_worker_change_the_batch(change):
    assert not torch.equal(batch(0, **change), batch(0))


def test_each_worker_has_an_order_of_its_own():
    # With one order for all, a global batch would be neighbouring text.
    orders = [
        [start // CONTEXT // 3 for start in starts(batch(step, worker=worker) for step in range(6))]
        for worker in range(3)
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_each_epoch_has_an_order_of_its_own():
    own = sequences_per_worker(401, context=CONTEXT, num_workers=1)
    first, second = (
        starts(batch(step, num_workers=1, batch_size=1) for step in range(epoch, epoch + own))
        for epoch in (0, own)
    )
    assert sorted(first) == sorted(second)
    assert first != second


def test_epochs_are_counted():
    assert epochs_seen(401, context=4, num_workers=2, steps=10, batch_size=5) == 1.0


def test_too_little_text_is_said_in_numbers():
    with pytest.raises(ValueError, match="8 tokens are too few for 2 workers: needed are 9"):
        sequences_per_worker(8, context=4, num_workers=2)
