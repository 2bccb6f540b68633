"""ArrayRecord <-> tensors, without copies where the bytes allow it.

Flower carries an array as the bytes of an .npy file. Reading it through `Array.numpy()` copies the
payload; here a tensor looks straight at the bytes behind the .npy header, and writing builds
header and payload with one copy.

bfloat16, which NumPy and so Flower do not know, travels as an array of dtype "bfloat16" whose .npy
payload holds the bits as uint16.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

__all__ = [
    "array_from_tensor",
    "named_like",
    "npy_from_tensor",
    "pseudo_gradients",
    "record_from_tensors",
    "records_of",
    "tensor_from_array",
    "tensor_from_npy",
    "tensors_from_record",
]

_Record = TypeVar("_Record", ArrayRecord, ConfigRecord, MetricRecord)

_STYPE = "numpy.ndarray"
_COMPILED = "_orig_mod."
_DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
)

with warnings.catch_warnings():
    # torch warns, once a process, of a NumPy array that is read-only; nothing here writes to one.
    # Filtering that at each array would take as long as reading a small one.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    torch.from_numpy(np.frombuffer(bytes(1), dtype=np.uint8))

_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def tensor_from_npy(data: bytes) -> Tensor:
    """Return a read-only view of the values in the bytes of an .npy file.

    Parameters
    ----------
    data : bytes
        An .npy file of numbers or bools.

    Returns
    -------
    Tensor
        On the CPU; shares the bytes, so it must not be written to. Big-endian and
        Fortran-ordered values are copied.

    Raises
    ------
    ValueError
        If the bytes are not such a file, whole and with nothing behind it.
    """
    file = BytesIO(data)  # shares the bytes
    try:
        read = _READERS[npy.read_magic(file)]
        shape, fortran_order, dtype = read(file)
    except Exception as error:  # NumPy evaluates the header's text, which raises all sorts
        raise ValueError("payload is not a whole .npy file") from error
    if dtype.newbyteorder("=").name not in _DTYPES:
        raise ValueError(f"payload of dtype {dtype}, allowed is one of {', '.join(_DTYPES)}")
    offset, count = file.tell(), math.prod(shape)
    if len(data) - offset != count * dtype.itemsize:
        raise ValueError(
            f"payload of {len(data) - offset} bytes, "
            f"{dtype} of shape {shape} takes {count * dtype.itemsize}"
        )
    values = np.frombuffer(data, dtype=dtype, count=count, offset=offset)
    values = values.reshape(shape, order="F" if fortran_order else "C")
    if not dtype.isnative or fortran_order:
        values = np.ascontiguousarray(values, dtype=dtype.newbyteorder("=")).reshape(shape)
    return torch.from_numpy(values)


def _announced(dtype: str) -> str | None:
    """Return the plain name of the dtype that an array announces, which is a client's own text."""
    try:
        return np.dtype(dtype).newbyteorder("=").name
    except Exception:  # NumPy evaluates the text, which raises all sorts
        return None


@lru_cache(maxsize=4096)
def _usual(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, np.dtype[Any], int]:
    """Return the .npy header that NumPy writes for an array, its dtype, and the file's size.

    A size of -1, which no file has, for an unusual dtype.
    """
    if dtype not in _DTYPES:
        return b"", np.dtype(bool), -1
    plain = np.dtype(dtype)
    file = BytesIO()
    content = {"descr": npy.dtype_to_descr(plain), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, content)
    header = file.getvalue()
    return header, plain, len(header) + math.prod(shape) * plain.itemsize


def npy_from_tensor(tensor: Tensor) -> bytes:
    """Return the bytes of the .npy file of a tensor, as NumPy itself would write it.

    Parameters
    ----------
    tensor : Tensor
        Any shape, any device; dtypes that NumPy knows.
    """
    values = np.ascontiguousarray(tensor.detach().cpu().numpy()).reshape(tensor.shape)
    header = BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(values))
    return b"".join([header.getvalue(), values.data])


def tensor_from_array(array: Array) -> Tensor:
    """Return a read-only view of the values of a Flower array.

    Parameters
    ----------
    array : Array
        An array in Flower's own serialisation (stype `numpy.ndarray`).

    Raises
    ------
    ValueError
        If the bytes are not what the array announces; see `tensor_from_npy`.
    """
    if array.stype != _STYPE:
        raise ValueError(f"serialisation {array.stype!r}, allowed is {_STYPE!r}")
    # Parsing a header takes as long as reading a small array: a payload that begins with the very
    # header its array announces needs none.
    data, shape = array.data, tuple(array.shape)
    header, dtype, size = _usual(array.dtype, shape)
    if len(data) == size and data.startswith(header):
        return torch.from_numpy(np.ndarray(shape, dtype, data, len(header)))
    tensor = tensor_from_npy(data)
    if array.dtype == "bfloat16" and tensor.dtype == torch.uint16:
        tensor = tensor.view(torch.bfloat16)
    elif _announced(array.dtype) != str(tensor.dtype).removeprefix("torch."):
        raise ValueError(f"payload of {tensor.dtype} under an array of dtype {array.dtype!r}")
    if tensor.shape != tuple(array.shape):
        raise ValueError(
            f"payload of shape {tuple(tensor.shape)} under an array of shape {tuple(array.shape)}"
        )
    return tensor


def array_from_tensor(tensor: Tensor) -> Array:
    """Serialise a tensor as a Flower array, byte for byte as Flower itself would.

    Parameters
    ----------
    tensor : Tensor
        Any shape, any device; dtypes that NumPy knows, and bfloat16.
    """
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return Array(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stype=_STYPE,
        data=npy_from_tensor(bits),
    )


def tensors_from_record(record: ArrayRecord) -> dict[str, Tensor]:
    """Return read-only views of all arrays of a record, by name.

    Raises
    ------
    ValueError
        If an array cannot be read; the message names it.
    """
    tensors = {}
    for name, array in record.items():
        try:
            tensors[name] = tensor_from_array(array)
        except (ValueError, TypeError) as error:
            raise ValueError(f"array {name!r}: {error}") from error
    return tensors


def records_of(content: RecordDict, kind: type[_Record]) -> dict[str, _Record]:
    """Return the records of one kind in a message's content, by name.

    What `content.array_records` and its like return refers to itself and to the content, so that a
    whole model stays in memory until Python looks for such cycles; this does not.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def named_like(tensors: Mapping[str, Tensor], reference: Iterable[str]) -> dict[str, Tensor]:
    """Give tensors the names of a reference where only `torch.compile`'s prefix differs.

    A compiled module's state_dict says `_orig_mod.` before the names of what was compiled.
    """
    reference = dict.fromkeys(reference)
    if tensors.keys() == reference.keys():
        return dict(tensors)
    names = {name.replace(_COMPILED, ""): name for name in reference}
    renamed = {names.get(name.replace(_COMPILED, ""), name): tensors[name] for name in tensors}
    # Two names that become one are not a matter of the prefix: one must not replace the other.
    return renamed if len(renamed) == len(tensors) else dict(tensors)


def record_from_tensors(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> ArrayRecord:
    """Serialise named tensors, one after the other, into a record."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    return ArrayRecord({name: array_from_tensor(tensor) for name, tensor in items})


def pseudo_gradients(
    sent: Mapping[str, Tensor], trained: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield what a worker answers with in place of its parameters.

    Parameters
    ----------
    sent : Mapping[str, Tensor]
        Parameters received, by name.
    trained : Mapping[str, Tensor]
        Parameters after the inner steps, on any device.
    dtype : torch.dtype
        float32, float16 or bfloat16, for all floating-point tensors.

    Yields
    ------
    tuple[str, Tensor]
        Name and `sent - trained`, subtracted in the parameter's own dtype; integer and bool tensors
        as they are.
    """
    for name, value in trained.items():
        if value.is_floating_point():
            yield name, (sent[name].to(value.device) - value).to(dtype)
        else:
            yield name, value
