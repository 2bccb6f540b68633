"""What a round keeps on disk and not in memory: replies before their turn, stacks of all workers.

The files have no name: they are gone when they are closed or the process ends, however that
happens.
"""

import ctypes
import dataclasses
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from logging import INFO, WARNING
from pathlib import Path

import numpy as np
import torch
from flwr.supercore import log
from torch import Tensor

from isoloco_flwr.aggregation import Reply, accumulation_dtype

__all__ = ["ScratchFullError", "ScratchStack", "give_back_freed_memory", "on_disk"]

_PAGE = 4096
_GIVE_BACK_BYTES = 64 << 20
"""After so many bytes of replies, freed memory is given back to the system."""

_ALIGNMENT = 64
"""Bytes of which a tensor's place in a file is a multiple, as processors like it."""


class ScratchFullError(OSError):
    """The disk has no room for a round's scratch file."""


class ScratchStack:
    """Pseudo-gradients of R workers on disk, read back one parameter at a time.

    The file keeps the R values of one parameter together, so that a merge looks at its stack
    (R, *shape) through a memory map, and no more than that stack is in memory.

    Parameters
    ----------
    reference : Mapping[str, Tensor]
        Parameters whose pseudo-gradients are kept, by name; floating point.
    num_workers : int
        R, the rows of every stack.
    folder : Path, optional
        Where the file lies; None takes the system's folder for temporary files.

    Raises
    ------
    ScratchFullError
        If the disk has no room for it, before anything is written; the message says how much is
        needed and how much there is.
    """

    def __init__(
        self, reference: Mapping[str, Tensor], num_workers: int, folder: Path | None = None
    ) -> None:
        self._reference = reference
        self._num_workers = num_workers
        self._offsets: dict[str, int] = {}
        size = 0
        for name, tensor in reference.items():
            self._offsets[name] = size
            block = num_workers * tensor.numel() * accumulation_dtype(tensor).itemsize
            size += -(-block // _PAGE) * _PAGE  # a memory map starts at a whole page
        where = Path(tempfile.gettempdir() if folder is None else folder)
        free = shutil.disk_usage(where).free
        if size > free:
            raise ScratchFullError(
                f"the pseudo-gradients of {num_workers} workers take {size / 1e9:.2f} GB, {where} "
                f"has {free / 1e9:.2f} GB free; scratch_dir can name another folder"
            )
        log(INFO, "Scratch file: %.1f MB for %d workers in %s", size / 1e6, num_workers, where)
        self._file = tempfile.TemporaryFile(dir=where)  # noqa: SIM115 - close() closes it
        os.truncate(self._file.fileno(), size)
        self._bytes_not_given_back = 0

    def write(self, row: int, reply: Reply) -> None:
        """Write the pseudo-gradients of one worker, 0 <= row < R, from its reply.

        Written through the file, not through a memory map: a full disk is an `OSError` here and
        not a crash, and pages written do not count as this process's memory.
        """
        for name, sent in self._reference.items():
            delta = reply.pseudo_gradient(name, sent)
            view = _bytes_of(delta)
            offset = self._offsets[name] + row * view.nbytes
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        self._bytes_not_given_back += reply.num_bytes
        if self._bytes_not_given_back >= _GIVE_BACK_BYTES:
            self._give_back()

    def read(self, name: str, rows: Sequence[int]) -> Tensor:
        """Return the stack (len(rows), *shape) of one parameter, to be written to at will.

        A memory map where `rows` are all R in order, a copy of those where some are left out.
        """
        if self._bytes_not_given_back:
            self._give_back()  # replies are done with, and stacks are large
        sent = self._reference[name]
        dtype = accumulation_dtype(sent)
        if not sent.numel():
            return torch.zeros((len(rows), *sent.shape), dtype=dtype)
        offset = self._offsets[name]
        if list(rows) == list(range(self._num_workers)):
            return self._map(offset, (self._num_workers, *sent.shape), dtype)
        stack = torch.empty((len(rows), *sent.shape), dtype=dtype)
        for values, row in zip(stack, rows, strict=True):
            values.copy_(self._map(offset + row * values.nbytes, sent.shape, dtype))
        return stack

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def _map(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = np.memmap(
            self._file,
            dtype=np.float64 if dtype == torch.float64 else np.float32,
            mode="c",  # copy on write: the file stays as it is
            offset=offset,
            shape=shape,
        )
        return torch.from_numpy(values)

    def _give_back(self) -> None:
        give_back_freed_memory()
        self._bytes_not_given_back = 0


def on_disk(reply: Reply, folder: Path | None = None) -> Reply:
    """Write a reply's tensors to a file and return it with tensors that look at that file.

    The file lives as long as they do. Where it cannot be written, the log says so and the reply
    stays as it is, in memory.

    Parameters
    ----------
    reply : Reply
        A reply whose tensors have any dtype and shape.
    folder : Path, optional
        Where the file lies; None takes the system's folder for temporary files.
    """
    tensors = {name: tensor for name, tensor in reply.tensors.items() if tensor.numel()}
    offsets: dict[str, int] = {}
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for name, tensor in tensors.items():
                offsets[name] = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                file.write(_bytes_of(tensor))
            file.flush()
            # Copy on write: nothing is written, but torch asks for memory that could be.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        log(WARNING, "A reply before its turn stays in memory, for the scratch file: %s", error)
        return reply
    mapped = {
        name: torch.frombuffer(
            content, dtype=tensor.dtype, count=tensor.numel(), offset=offsets[name]
        ).view(tensor.shape)
        for name, tensor in tensors.items()
    }
    return dataclasses.replace(reply, tensors={**reply.tensors, **mapped})


def _bytes_of(tensor: Tensor) -> memoryview:
    """Look at the bytes of a tensor's values, row by row; not copied where they lie so."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return the C library's function, which glibc has and others have not."""
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return function


def give_back_freed_memory() -> None:
    """Give memory that has been freed back to the system, where the C library can.

    Where something small stays of each reply, glibc finds no room for the next one in what the last
    one left: 25 times a reply's size was seen.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)
