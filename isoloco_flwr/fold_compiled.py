"""`fold.fold_tensors` as one compiled loop; needs numba."""

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from isoloco_flwr.fold import fold_plain, fold_tensors

__all__ = ["fold_compiled", "fold_tensors_compiled"]

_BLOCK = 4096
"""Elements whose sums stay in a core's first cache while all workers are added."""

_LINE = 16
"""Elements of a cache line."""

_LARGEST = np.finfo(np.float32).max


def fold_tensors_compiled(
    out: Sequence[Tensor],
    total: Sequence[Tensor],
    start: Sequence[Tensor] | None,
    values: Sequence[Sequence[Tensor]],
    weights: Sequence[float],
    *,
    pool: Executor,
) -> bool:
    """Do what `fold.fold_tensors` does, with the same bits, in as many threads as torch has.

    Tensors that are float32 on all sides, with elements in a row at aligned addresses, take one
    call together; the others are folded chunk by chunk.
    """
    at_once: list[int] = []
    rest = range(len(out))
    is_finite = True
    if start is not None:
        rows = (out, total, start, *values)
        at_once = [place for place in rest if all(_is_plain(row[place]) for row in rows[1:])]
        share = partial(
            _add,
            np.array([[row[place].data_ptr() for place in at_once] for row in rows], np.int64),
            np.array([out[place].numel() for place in at_once], np.int64),
            np.array(weights, np.float32),
        )
        threads = torch.get_num_threads()
        shares = pool.map(share, [threads] * (threads - 1), range(1, threads))
        is_finite = share(threads, 0) & min(shares, default=True)
    if len(at_once) < len(out):
        others = sorted(set(rest) - set(at_once))

        def pick(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensors[place] for place in others]

        is_finite &= fold_tensors(
            pick(out),
            pick(total),
            None if start is None else pick(start),
            list(map(pick, values)),
            weights,
            fold_compiled,
        )
    return is_finite


def fold_compiled(
    out: NDArray[Any],
    total: NDArray[Any],
    start: NDArray[Any],
    values: Sequence[NDArray[Any]],
    weights: Sequence[float],
) -> bool:
    """Do what `fold_plain` does, with the same bits.

    float64, and arrays whose elements do not lie in a row at aligned addresses, are left to
    `fold_plain`.
    """
    arrays = (out, total, start, *values)
    if out.dtype != np.float32 or not all(array.flags.carray for array in arrays):
        return fold_plain(out, total, start, values, weights)
    addresses = np.array([[array.ctypes.data] for array in arrays], np.int64)
    is_finite: bool = _add(addresses, np.array([out.size]), np.array(weights, np.float32), 1, 0)
    return is_finite


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.data_ptr() % 4


@intrinsic
def _pointer(_: Any, address: Any = None) -> Any:
    """Take an address for that of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(address), generate  # type: ignore[no-untyped-call]


@intrinsic
def _write_line(_: Any, address: Any = None, values: Any = None, begin: Any = None) -> Any:
    """Write values[begin : begin + 16] to an address that 64 divides, past the caches.

    What is only written costs a trip to memory less so: a cache would read the line first.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), _LINE).as_pointer()
        source = context.make_array(signature.args[1])(context, builder, arguments[1]).data
        value = builder.load(builder.bitcast(builder.gep(source, [arguments[2]]), line), align=4)
        store = builder.store(value, builder.inttoptr(arguments[0], line), align=64)
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(address, values, begin), generate


@njit(cache=True, nogil=True, inline="always")
def _floats(address: int, begin: int, count: int) -> NDArray[np.float32]:
    return carray(_pointer(address + 4 * begin), count)


@njit(cache=True, nogil=True, error_model="numpy")
def _add(
    addresses: NDArray[np.int64],
    sizes: NDArray[np.int64],
    weights: NDArray[np.float32],
    threads: int,
    thread: int,
) -> bool:
    """Fold a thread's share: rows of addresses are out, total, start and one for each worker."""
    is_finite = True
    sums = np.empty(_BLOCK, np.float32)
    fours = weights.size - weights.size % 4
    for place in range(sizes.size):
        lines = (sizes[place] + _LINE - 1) // _LINE
        end = min(lines * (thread + 1) // threads * _LINE, sizes[place])
        for begin in range(lines * thread // threads * _LINE, end, _BLOCK):
            # Views that begin at 0: an index that may be negative is not vectorised.
            count = min(_BLOCK, end - begin)
            out = _floats(addresses[0, place], begin, count)
            total = _floats(addresses[1, place], begin, count)
            start = _floats(addresses[2, place], begin, count)
            for i in range(count):
                sums[i] = total[i]
            # Four workers at once, in their order, for one trip of the sums to the cache.
            for worker in range(3, 3 + fours, 4):
                a = _floats(addresses[worker, place], begin, count)
                b = _floats(addresses[worker + 1, place], begin, count)
                c = _floats(addresses[worker + 2, place], begin, count)
                d = _floats(addresses[worker + 3, place], begin, count)
                of_a, of_b = weights[worker - 3], weights[worker - 2]
                of_c, of_d = weights[worker - 1], weights[worker]
                for i in range(count):
                    sent = start[i]
                    value = sums[i] + (sent - a[i]) * of_a
                    value += (sent - b[i]) * of_b
                    value += (sent - c[i]) * of_c
                    sums[i] = value + (sent - d[i]) * of_d
            for worker in range(3 + fours, 3 + weights.size):
                a = _floats(addresses[worker, place], begin, count)
                of_a = weights[worker - 3]
                for i in range(count):
                    sums[i] += (start[i] - a[i]) * of_a
            for i in range(count):
                is_finite &= abs(sums[i]) <= _LARGEST
            in_lines = 0 if addresses[0, place] % 64 else count - count % _LINE
            for i in range(0, in_lines, _LINE):
                _write_line(addresses[0, place] + 4 * (begin + i), sums, i)
            for i in range(in_lines, count):
                out[i] = sums[i]
    return is_finite
