"""Records and tensors are the same bytes on both sides."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from isoloco_flwr.records import (
    array_from_tensor,
    record_from_tensors,
    tensor_from_array,
    tensors_from_record,
)

DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]


@given(
    hnp.arrays(
        dtype=st.sampled_from(DTYPES), shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)
    )
)
def test_the_bytes_are_those_of_flower(values):
    ours = array_from_tensor(torch.from_numpy(values.copy()))
    flowers = Array(np.ascontiguousarray(values).reshape(values.shape))
    assert (ours.dtype, ours.shape, ours.stype) == (flowers.dtype, flowers.shape, flowers.stype)
    assert ours.data == flowers.data
    tensor = tensor_from_array(flowers)
    assert tensor.shape == values.shape
    np.testing.assert_array_equal(tensor.numpy(), values)
    assert tensor.numpy().dtype == values.dtype


def test_reading_does_not_copy():
    array = Array(np.arange(6, dtype=np.float32))
    expected = np.frombuffer(array.data, dtype=np.float32, count=6, offset=len(array.data) - 24)
    assert tensor_from_array(array).data_ptr() == expected.__array_interface__["data"][0]


@pytest.mark.parametrize("stored", [np.asfortranarray, lambda x: x.astype(">f4")])
def test_unusual_layouts_are_read_right(stored):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(tensor_from_array(Array(stored(values))).numpy(), values)


def test_a_transposed_tensor_is_written_right():
    tensor = torch.arange(12.0).view(3, 4).T
    np.testing.assert_array_equal(array_from_tensor(tensor).numpy(), tensor.numpy())


@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
def test_bfloat16_travels_as_its_bits(shape):
    tensor = torch.randn(shape).to(torch.bfloat16)
    array = array_from_tensor(tensor)
    assert array.dtype == "bfloat16"
    assert array.numpy().dtype == np.uint16  # what somebody without this project would see
    back = tensor_from_array(array)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, tensor)


def test_names_and_their_order_survive():
    tensors = {"b": torch.ones(2), "a": torch.zeros(())}
    back = tensors_from_record(record_from_tensors(tensors))
    assert list(back) == ["b", "a"]


GOOD = Array(np.arange(6, dtype=np.float32).reshape(2, 3))


@pytest.mark.parametrize(
    "bad",
    [
        Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=b""),
        Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=b"garbage" * 30),
        Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=GOOD.data[:-1]),
        Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=GOOD.data + b"x"),
        Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=GOOD.data[:64]),
        Array(dtype="float32", shape=(3, 2), stype="numpy.ndarray", data=GOOD.data),
        Array(dtype="float32", shape=(2, 3), stype="pickle", data=GOOD.data),
        Array(np.array(["a"])),
        Array(np.ones(2, dtype=np.complex64)),
    ],
)
def test_bytes_that_are_not_the_array_are_refused_by_name(bad):
    with pytest.raises(ValueError, match="'weight'"):
        tensors_from_record(ArrayRecord({"weight": bad}))
