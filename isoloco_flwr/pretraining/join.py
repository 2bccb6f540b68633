"""The last step of making token files: the parts of a source become one file a side."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from isoloco_flwr.pretraining.document import CorpusError
from isoloco_flwr.pretraining.tokenizer import TextTokenizer

__all__ = ["SIDES", "join"]

SIDES = ("train", "held-out")

_BLOCK = 16 << 20
"""Bytes that are copied at a time."""


def join(
    parts: list[Path],
    folder: Path,
    tokenizer: TextTokenizer,
    labelled: bool,
    stop_after: int | None,
) -> dict[str, Any]:
    """Put parts one after the other.

    Parameters
    ----------
    parts : list[Path]
        Folders of the parts, in order.
    folder : Path
        Where the files go.
    tokenizer : TextTokenizer
        What made the tokens.
    labelled : bool
        Whether to write labels.
    stop_after : int, optional
        Tokens after which no document is taken.

    Returns
    -------
    dict[str, Any]
        What the manifest says of the files.
    """
    names = ["train.bin", "held-out.bin", "train-documents.bin"]
    if labelled:
        names += ["train-labels.bin", "label-names.json"]
    writers = {name: _Writer((folder / name).open("wb")) for name in names}
    tokens = dict.fromkeys(SIDES, 0)
    documents = dict.fromkeys(SIDES, 0)
    labels: dict[str, int] = {}
    left = stop_after
    writers["train-documents.bin"].write(np.zeros(1, np.int64).tobytes())
    for part in parts:
        lengths = np.fromfile(part / "documents.bin", np.int64)
        if left is not None:
            ends = np.cumsum(np.abs(lengths))
            lengths = lengths[: np.searchsorted(ends, left) + 1]
            left -= int(np.abs(lengths).sum())
        for side, own in zip(SIDES, (lengths[lengths > 0], -lengths[lengths < 0]), strict=True):
            if side == "train":
                offsets = tokens[side] + np.cumsum(own)
                writers["train-documents.bin"].write(offsets.tobytes())
            count = int(own.sum())
            writers[f"{side}.bin"].copy(part / f"{side}.bin", count * tokenizer.dtype.itemsize)
            tokens[side] += count
            documents[side] += len(own)
        if labelled:
            own_labels = np.fromfile(part / "labels.bin", np.int32)[: (lengths > 0).sum()]
            # Numbered as they come: those of the documents cut off come last.
            own_names = json.loads((part / "labels.json").read_text())
            taken = own_names[: own_labels.max(initial=-1) + 1]
            numbers = [labels.setdefault(name, len(labels)) for name in taken]
            writers["train-labels.bin"].write(np.array(numbers, np.int32)[own_labels].tobytes())
    if labelled:
        writers["label-names.json"].write(json.dumps(list(labels)).encode())
    files = {name: writer.close() for name, writer in writers.items()}
    return {
        "vocabulary": tokenizer.vocabulary_size,
        "end-of-text": tokenizer.end_of_text,
        "dtype": tokenizer.dtype.name,
        **{
            side: {
                "tokens": tokens[side],
                "documents": documents[side],
                "sha256": files[f"{side}.bin"]["sha256"],
            }
            for side in SIDES
        },
        "files": files,
    }


class _Writer:
    """A file whose checksum is taken while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)

    def copy(self, path: Path, size: int) -> None:
        """Write the first bytes of another file."""
        with path.open("rb") as file:
            while size:
                block = file.read(min(size, _BLOCK))
                if not block:
                    raise CorpusError(f"{path} was cut: delete {path.parent.parent}")
                self.write(block)
                size -= len(block)

    def close(self) -> dict[str, Any]:
        """Return size and checksum, once the file is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        return {"bytes": size, "sha256": self._digest.hexdigest()}
