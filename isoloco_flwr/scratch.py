"""A scratch file for the merges that need every worker's pseudo-gradient of a parameter at once."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from logging import INFO
from pathlib import Path

import numpy as np
import torch
from flwr.supercore import log
from torch import Tensor

from isoloco_flwr.aggregation import Reply, accumulation_dtype

__all__ = ["ScratchFullError", "ScratchStack"]

_PAGE = 4096


class ScratchFullError(OSError):
    """The disk has no room for a round's scratch file."""


class ScratchStack:
    """Pseudo-gradients of R workers on disk, read back one parameter at a time.

    The file keeps the R values of one parameter together, so that a merge looks at its stack
    (R, *shape) through a memory map, and no more than that stack is in memory. The file has no
    name: it is gone when it is closed or the process ends, however that happens.

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

    def write(self, row: int, reply: Reply) -> None:
        """Write the pseudo-gradients of one worker, 0 <= row < R, from its reply.

        Written through the file, not through a memory map: a full disk is an `OSError` here and
        not a crash, and pages written do not count as this process's memory.
        """
        for name, sent in self._reference.items():
            delta = reply.pseudo_gradient(name, sent)
            view = delta.reshape(-1).view(torch.uint8).numpy().data
            offset = self._offsets[name] + row * view.nbytes
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written

    def read(self, name: str, rows: Sequence[int]) -> Tensor:
        """Return the stack (len(rows), *shape) of one parameter.

        A read-only memory map where `rows` are all R in order, a copy where some are left out.
        """
        sent = self._reference[name]
        shape = (self._num_workers, *sent.shape)
        dtype = accumulation_dtype(sent)
        if not sent.numel():
            return torch.zeros((len(rows), *sent.shape), dtype=dtype)
        stack = np.memmap(
            self._file,
            dtype=np.float64 if dtype == torch.float64 else np.float32,
            mode="c",  # copy on write: the file stays as it is and torch gets a writable array
            offset=self._offsets[name],
            shape=shape,
        )
        tensor = torch.from_numpy(stack)
        return tensor if list(rows) == list(range(self._num_workers)) else tensor[list(rows)]

    def close(self) -> None:
        """Delete the file."""
        self._file.close()
