"""Batches: disjoint between workers, and a pure function of seed, worker and step."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isoloco_flwr.pretraining.stream import (
    WorkerStream,
    epochs_seen,
    sequences_per_worker,
    worker_batch,
)

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


def plain_batch(tokens, *, context, seed, worker, num_workers, step, batch_size):
    """Cut a batch without documents, sequence by sequence."""
    own = (len(tokens) - 1) // context // num_workers
    rows = []
    for place in range(step * batch_size, (step + 1) * batch_size):
        epoch, within = divmod(place, own)
        order = np.random.default_rng((seed, worker, epoch)).permutation(own)
        start = (worker + num_workers * order[within]) * context
        rows.append(tokens[start : start + context + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


@given(
    num_tokens=st.integers(30, 600),
    dtype=st.sampled_from([np.uint16, np.uint32]),
    seed=st.integers(0, 2**40),
    num_workers=st.integers(1, 7),
    step=st.integers(0, 60),
    batch_size=st.integers(1, 40),
    data=st.data(),
)
def test_a_stream_without_documents_is_the_plain_loop(
    num_tokens, dtype, seed, num_workers, step, batch_size, data
):
    which = {
        "context": CONTEXT,
        "seed": seed,
        "worker": data.draw(st.integers(0, num_workers - 1)),
        "num_workers": num_workers,
    }
    tokens = np.arange(num_tokens, dtype=dtype)
    expected = plain_batch(tokens, **which, step=step, batch_size=batch_size)
    rows = WorkerStream(tokens, **which).batch(step, batch_size)
    assert rows.dtype == torch.int64
    assert torch.equal(rows, expected)
    assert torch.equal(worker_batch(tokens, **which, step=step, batch_size=batch_size), expected)


def test_the_batches_of_a_run_stay_what_they_were():
    # Written down from the first release: a run that goes on must read what it would have read.
    rows = batch(7, seed=5, worker=2, batch_size=3)
    assert rows[:, 0].tolist() == [8, 236, 368]
    assert starts([batch(0, seed=0, worker=0)]) == [24, 120, 276, 312, 132]


def stream(tokens, *, documents=None, seed=0, worker=1, num_workers=3, context=CONTEXT):
    return WorkerStream(
        tokens,
        context=context,
        seed=seed,
        worker=worker,
        num_workers=num_workers,
        documents=documents,
    )


@st.composite
def corpora(draw):
    """Tokens that say where they are, the documents' offsets, and a worker's own documents."""
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=20))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    own = draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))
    return np.arange(offsets[-1], dtype=np.uint16), offsets, np.array(sorted(own))


@given(corpus=corpora(), batch_size=st.integers(1, 9))
def test_an_epoch_reads_each_sequence_of_the_own_documents_once(corpus, batch_size):
    tokens, offsets, own = corpus
    text = np.concatenate([tokens[offsets[index] : offsets[index + 1]] for index in own])
    count = (len(text) - 1) // CONTEXT
    if count < 1:
        with pytest.raises(ValueError, match=f"worker 1 of 3 has {len(text)} tokens"):
            stream(tokens, documents=(offsets, own))
        return
    reader = stream(tokens, documents=(offsets, own))
    assert reader.sequences == count
    epochs = 2
    read = [reader.batch(step, batch_size) for step in range(-(-epochs * count // batch_size))]
    rows = torch.cat(read)[: epochs * count].numpy()
    expected = {tuple(text[i * CONTEXT : i * CONTEXT + CONTEXT + 1]) for i in range(count)}
    for epoch in range(epochs):
        seen = [tuple(row) for row in rows[epoch * count : (epoch + 1) * count]]
        assert set(seen) == expected
        assert len(seen) == count
    # A resumed run starts anywhere and reads the same.
    last = len(read) - 1
    assert torch.equal(stream(tokens, documents=(offsets, own)).batch(last, batch_size), read[last])


def test_workers_of_disjoint_documents_share_no_input():
    offsets = np.arange(0, 1001, 10)
    tokens = np.arange(1000, dtype=np.uint16)
    seen = []
    for worker in range(4):
        reader = stream(tokens, documents=(offsets, np.arange(worker, 100, 4)), worker=worker)
        seen += reader.batch(0, reader.sequences)[:, :-1].flatten().tolist()
    assert len(seen) == len(set(seen))
    assert len(seen) > 900


@pytest.mark.parametrize("change", [{"seed": 1}, {"worker": 0}])
def test_seed_and_worker_order_the_own_documents(change):
    tokens = np.arange(400, dtype=np.uint16)
    documents = (np.array([0, 100, 400]), np.array([0, 1]))
    first, other = (
        stream(tokens, documents=documents, **which).batch(0, 20) for which in ({}, change)
    )
    assert not torch.equal(first, other)


def test_all_documents_in_order_are_the_tokens_as_they_lie():
    tokens = np.arange(400, dtype=np.uint16)
    documents = (np.array([0, 100, 100, 333, 400]), np.arange(4))
    whole = stream(tokens, num_workers=1, worker=0)
    assert torch.equal(
        stream(tokens, documents=documents, num_workers=1, worker=0).batch(3, 50),
        whole.batch(3, 50),
    )


def test_a_memory_map_is_read_in_place(tmp_path):
    # A corpus of 8 GiB, sparse on disk: a copy would take longer than the test may, and the memory.
    path = tmp_path / "tokens"
    with path.open("wb") as file:
        file.truncate(2**33)
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    documents = (np.array([0, 2**31, 2**32]), np.array([1]))
    for own in (None, documents):
        tracemalloc.start()
        rows = stream(tokens, documents=own, context=2**20).batch(0, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert rows.shape == (1, 2**20 + 1)
        assert peak < 2**27


@pytest.mark.parametrize("documents", [None, (np.array([0, 401]), np.array([0]))])
def test_a_stream_counts_its_epochs(documents):
    tokens = np.arange(401, dtype=np.uint16)
    reader = stream(tokens, documents=documents, num_workers=2)
    assert reader.epochs(10, 5) == 50 / reader.sequences
    assert reader.sequences == (50 if documents is None else 100)


@pytest.mark.parametrize(
    ("own", "numbers"), [([0], "4 tokens in 1 documents"), ([], "0 tokens in 0 documents")]
)
def test_too_few_documents_are_said_in_numbers(own, numbers):
    documents = (np.array([0, 4, 100]), np.array(own, np.int64))
    with pytest.raises(ValueError, match=f"worker 1 of 3 has {numbers}, too few for one .* of 4"):
        stream(np.arange(100, dtype=np.uint16), documents=documents)
