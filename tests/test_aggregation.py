"""Adding replies up: order, precision, dtypes, and what lies on disk."""

import dataclasses
import math
import shutil
import weakref

import pytest
import torch
from flwr.app import RecordDict
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from isoloco_flwr.aggregation import MeanAccumulator, Reply, in_order, is_finite
from isoloco_flwr.scratch import ScratchFullError, ScratchStack, on_disk


def as_reply(tensors, weight=1.0):
    return Reply(tensors=tensors, weight=weight, metrics=RecordDict(), num_bytes=0)


def refuse_to_set_aside(reply):
    raise AssertionError("few bytes wait, none of them need go")


def refuse(position, reason):
    raise AssertionError(f"reply {position} is left out: {reason}")


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_replies_come_out_in_order_whatever_order_they_come_in(order, left_out, missing):
    replies = {place: as_reply({"id": torch.tensor(place)}) for place in range(6)}
    arriving = [
        (place, None if place in left_out else replies[place])
        for place in order
        if place not in missing
    ]
    expected = [place for place in range(6) if place not in left_out | missing]
    came = [
        (place, int(reply.tensors["id"]))
        for place, reply in in_order(arriving, refuse_to_set_aside)
    ]
    assert came == [(place, place) for place in expected]


def test_a_reply_in_turn_is_handed_on_before_the_next_is_fetched():
    fetched = []

    def replies():
        for place in range(3):
            fetched.append(place)
            yield place, as_reply({})

    for seen, _ in enumerate(in_order(replies(), refuse_to_set_aside), start=1):
        assert len(fetched) == seen


def test_replies_beyond_16_mb_wait_elsewhere_and_memory_that_is_free_again_is_used_again():
    size = 6 << 20  # two of them fit
    replies = [as_reply({"id": torch.tensor([place]).expand(size // 8)}) for place in range(7)]
    aside = []

    def set_aside(reply):
        aside.append(int(reply.tensors["id"][0]))
        return as_reply({"id": reply.tensors["id"][:1]})

    arriving = [(place, replies[place]) for place in (3, 1, 2, 0, 6, 5, 4)]
    came = [(place, int(reply.tensors["id"][0])) for place, reply in in_order(arriving, set_aside)]
    assert came == [(place, place) for place in range(7)]
    assert aside == [2]


def test_what_waits_elsewhere_is_not_kept_in_memory(tmp_path):
    size = 6 << 20
    alive = []

    def replies():
        for place in (4, 3, 2, 1, 0):
            tensor = torch.full((size // 4,), float(place))
            alive.append(weakref.ref(tensor))
            yield place, as_reply({"weight": tensor})
            del tensor
            assert sum(one() is not None for one in alive) <= 2

    came = in_order(replies(), lambda reply: on_disk(reply, tmp_path))
    for turn, (place, reply) in enumerate(came):
        assert place == turn
        assert torch.equal(reply.tensors["weight"], torch.full((size // 4,), float(place)))
    assert len(alive) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_the_mean_is_as_exact_as_its_dtype(dtype, num_workers):
    generator = torch.Generator().manual_seed(0)

    def draw(size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    # Longer than one chunk, and not a multiple of it.
    reference = {"weight": draw(70_001)}
    workers = [{"weight": reference["weight"] + 1e-3 * draw(70_001)} for _ in range(num_workers)]
    weights = [1.0 + worker for worker in range(num_workers)]
    accumulator = MeanAccumulator(reference, refuse)
    for place, (tensors, weight) in enumerate(zip(workers, weights, strict=True)):
        accumulator.add(place, as_reply(tensors, weight))
    mean = accumulator.finish()["weight"]
    exact = sum(
        weight * (reference["weight"].double() - tensors["weight"].double())
        for tensors, weight in zip(workers, weights, strict=True)
    ) / sum(weights)
    tolerance = 1e-15 if dtype == torch.float64 else 1e-6
    error = (mean.double() - exact).norm() / exact.norm()
    assert error < tolerance
    assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_small_updates_of_large_parameters_are_not_lost():
    reference = {"weight": torch.full((1000,), 1000.0)}
    step = torch.arange(1000) % 2 * 2.0**-13  # one unit in the last place of 1000
    accumulator = MeanAccumulator(reference, refuse)
    for place in range(128):
        accumulator.add(place, as_reply({"weight": reference["weight"] - step}))
    assert torch.equal(accumulator.finish()["weight"], step)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_bad_value_is_found(bad, dtype):
    tensor = torch.ones(100, dtype=dtype)
    assert is_finite(tensor)
    tensor[63] = bad
    assert not is_finite(tensor)


def test_large_finite_values_are_finite():
    assert is_finite(torch.full((10,), 3e38))
    assert is_finite(torch.full((100,), 65504, dtype=torch.float16))


def test_opposite_infinities_are_found():
    assert not is_finite(torch.tensor([math.inf, -math.inf]))


SHAPES = {"matrix": (5, 3), "vector": (4097,), "scalar": (), "empty": (0, 4), "double": (2,)}


def scratch_model(seed):
    generator = torch.Generator().manual_seed(seed)
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    model["double"] = model["double"].double()
    return model


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 2], [1]])
def test_the_scratch_file_gives_back_what_went_in(rows, tmp_path):
    reference = scratch_model(0)
    workers = [scratch_model(worker + 1) for worker in range(3)]
    stack = ScratchStack(reference, 3, tmp_path)
    for row in reversed(rows):
        stack.write(row, as_reply(workers[row]))
    for name, sent in reference.items():
        expected = torch.stack([sent - workers[row][name] for row in rows])
        assert torch.equal(stack.read(name, rows), expected)
    stack.close()
    assert list(tmp_path.iterdir()) == []


def test_a_reply_on_disk_is_the_reply(tmp_path):
    tensors = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "bits": torch.tensor([True, False, True]),
        "brain": torch.randn(3, 5).bfloat16(),
        "half": torch.randn(3, 5).half(),
        "not finite": torch.tensor([math.nan, -math.inf, -0.0]),
        "counter": torch.tensor(2**40),
        "wide": torch.randn(5, 3).mT,
        **scratch_model(1),
    }
    reply = dataclasses.replace(as_reply(tensors, 3.0), is_pseudo_gradient=True, num_bytes=9)
    read = on_disk(reply, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert dataclasses.replace(read, tensors=None) == dataclasses.replace(reply, tensors=None)
    assert list(read.tensors) == list(tensors)
    for name, tensor in tensors.items():
        got = read.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert_close(got, tensor, rtol=0, atol=0, equal_nan=True)
        assert tensor.numel() == 0 or got.data_ptr() != tensor.data_ptr()


def test_a_reply_that_no_disk_takes_stays_in_memory(tmp_path, caplog):
    reply = as_reply(scratch_model(1))
    with caplog.at_level("WARNING", logger="flwr"):
        assert on_disk(reply, tmp_path / "missing") is reply
    assert "stays in memory" in caplog.text
    assert str(tmp_path / "missing") in caplog.text


def test_a_disk_too_small_is_said_before_anything_is_written(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    reference = {"weight": torch.empty(1).expand(free // 4, 1)}
    with pytest.raises(ScratchFullError, match=rf"3 workers take .* GB.*{tmp_path}.*GB free"):
        ScratchStack(reference, 3, tmp_path)
