"""The compiled loop and the plain one: the same bits, and the same word on what is finite."""

import math

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco_flwr.aggregation import MeanAccumulator, Reply
from isoloco_flwr.fold import fastest_fold, fold_plain, fold_tensors
from isoloco_flwr.fold_compiled import fold_compiled, fold_tensors_compiled


def draw(size, workers, dtype, seed=0):
    rng = np.random.default_rng(seed)
    start, total = rng.standard_normal((2, size)).astype(dtype)
    values = [start + rng.standard_normal(size).astype(dtype) / 1000 for _ in range(workers)]
    return total, start, values


def test_the_compiled_loop_is_taken_where_numba_is_installed():
    assert fastest_fold().func is fold_tensors_compiled


@settings(deadline=None)  # the first call with each number of workers compiles
@given(
    st.integers(0, 70),
    st.integers(1, 12),
    st.sampled_from([np.float32, np.float64]),
    st.lists(st.floats(0, 2.0**63), min_size=12, max_size=12),
)
def test_both_loops_give_the_same_bits(size, workers, dtype, weights):
    total, start, values = draw(size, workers, dtype)
    plain, compiled = np.empty_like(total), np.empty_like(total)
    assert fold_plain(plain, total, start, values, weights[:workers])
    assert fold_compiled(compiled, total, start, values, weights[:workers])
    assert plain.tobytes() == compiled.tobytes()


@pytest.mark.parametrize("fold", [fold_plain, fold_compiled])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("worker", [0, 4, 5, 7])
@pytest.mark.parametrize("weight", [0.0, 1.0, 3.0])
def test_a_value_that_is_not_finite_is_told(fold, bad, worker, weight):
    total, start, values = draw(33, 8, np.float32)
    values[worker][17] = bad
    assert not fold(np.empty_like(total), total, start, values, [weight] * 8)


@pytest.mark.parametrize("fold", [fold_plain, fold_compiled])
def test_values_whose_sum_alone_overflows_are_finite(fold):
    total = np.full(8, 2e38, np.float32)
    zero = np.zeros(8, np.float32)
    assert fold(np.empty_like(total), total, zero, [zero], [1.0])


def test_values_at_odd_addresses_are_added_too():
    total, start, values = draw(9, 3, np.float32)
    odd = np.frombuffer(b"." + values[1].tobytes(), np.uint8)[1:].view(np.float32)
    assert not odd.flags.aligned
    plain, compiled = np.empty_like(total), np.empty_like(total)
    fold_plain(plain, total, start, values, [1.0] * 3)
    fold_compiled(compiled, total, start, [values[0], odd, values[2]], [1.0] * 3)
    assert plain.tobytes() == compiled.tobytes()


def at_an_odd_address(tensor):
    data = bytearray(b"." + tensor.numpy().tobytes())
    odd = np.frombuffer(data, np.uint8)[1:].view(np.float32)
    assert not odd.flags.aligned
    return torch.from_numpy(odd.reshape(tensor.shape))


def not_in_a_row(tensor):
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


FORMS = {
    "plain": lambda tensor: tensor,
    "at an odd address": at_an_odd_address,
    "not in a row": not_in_a_row,
    "bfloat16": lambda tensor: tensor.bfloat16(),
    "float16": lambda tensor: tensor.half(),
}


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.sampled_from([(0,), (), (3, 5), (4096,), (4097,), (2, 5000)]), max_size=5),
    workers=st.integers(1, 6),
    forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=36, max_size=36),
    weights=st.lists(st.floats(0, 1e9), min_size=6, max_size=6),
    is_difference=st.booleans(),
    is_bad=st.booleans(),
)
def test_a_whole_model_gets_the_same_bits(shapes, workers, forms, weights, is_difference, is_bad):
    generator = torch.Generator().manual_seed(0)
    form = iter(forms)

    def model(*, plain=False):
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        return [
            tensor if plain or not tensor.numel() else FORMS[next(form)](tensor)
            for tensor in tensors
        ]

    total, start = model(plain=True), model()
    values = [model() for _ in range(workers)]
    is_bad = is_bad and any(tensor.numel() for tensor in total)
    if is_bad:
        worst = max(range(len(shapes)), key=lambda place: total[place].numel())
        values[-1][worst].view(-1)[-1:].fill_(math.nan)
    results = []
    for fold in (fold_tensors, fastest_fold()):
        out = [torch.empty_like(tensor) for tensor in total]
        is_finite = fold(out, total, start if is_difference else None, values, weights[:workers])
        assert is_finite is not is_bad
        results.append([tensor.numpy().tobytes() for tensor in out])
    assert results[0] == results[1]


@pytest.mark.parametrize("group_bytes", [1, 400, 1 << 20])
@pytest.mark.parametrize("in_hand", [False, True])
def test_a_reply_that_is_not_finite_leaves_no_trace(group_bytes, in_hand, monkeypatch):
    limit = "_PENDING_BYTES_IN_HAND" if in_hand else "_PENDING_BYTES"
    monkeypatch.setattr(f"isoloco_flwr.aggregation.{limit}", group_bytes)
    generator = torch.Generator().manual_seed(0)
    reference = {"first": torch.randn(9, generator=generator), "last": torch.zeros(30)}
    replies = [
        Reply(
            {name: value + place for name, value in reference.items()},
            weight=1.0 + place,
            metrics=RecordDict(),
            num_bytes=0,
        )
        for place in range(9)
    ]
    for place in (0, 4, 8):
        replies[place].tensors["last"][29] = math.nan
    left_out = []
    among = MeanAccumulator(
        reference, lambda place, reason: left_out.append((place, reason)), in_hand=in_hand
    )
    alone = MeanAccumulator(reference, pytest.fail)
    for place, reply in enumerate(replies):
        among.add(place, reply)
        if place not in (0, 4, 8):
            alone.add(place, reply)
    means, expected = among.finish(), alone.finish()
    reason = "array 'last' has values that are not finite"
    assert left_out == [(place, reason) for place in (0, 4, 8)]
    for name in reference:
        assert torch.equal(means[name], expected[name])
