"""The folder for what can be made again, its locks, and which files have been checked."""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from isoloco_flwr.pretraining.document import CorpusError

__all__ = ["cache_folder", "check_files", "locked"]

_BLOCK = 16 << 20
"""Bytes that are checked at a time."""


def cache_folder() -> Path:
    """Return the folder for what can be made again: $ISOLOCO_CACHE or ~/.cache/isoloco_flwr."""
    return Path(os.environ.get("ISOLOCO_CACHE") or "~/.cache/isoloco_flwr").expanduser()


def check_files(
    folder: Path, files: dict[str, Any], dtype: np.dtype[np.unsignedinteger], vocabulary: int
) -> None:
    """Check token files: sizes always, the rest once for every state of a file.

    Parameters
    ----------
    folder : Path
        Where they lie.
    files : dict[str, Any]
        "bytes" and "sha256" by name.
    dtype : np.dtype[np.unsignedinteger]
        Type of the tokens.
    vocabulary : int
        All tokens must be below.

    Raises
    ------
    CorpusError
        If a file is not what it should be.

    Notes
    -----
    A stamp in the cache folder remembers size, time of change and inode of each file that was read
    through, and what was asked of it; only what has changed since is read again.
    """
    stamps: dict[str, list[Any]] = {}
    for name, file in files.items():
        status = (folder / name).stat()
        if status.st_size != file["bytes"]:
            raise CorpusError(
                f"{folder / name} has {status.st_size} bytes: allowed are the {file['bytes']} of "
                "the manifest; it was cut or edited"
            )
        rule = [file["sha256"], dtype.name, vocabulary]
        stamps[name] = [status.st_size, status.st_mtime_ns, status.st_ino, *rule]
    path = cache_folder() / "checked" / f"{_digest(folder)}.json"
    if _read_stamps(path) == stamps:
        return
    with locked(path):  # of processes that start together, one reads
        known = _read_stamps(path)
        for name in files:
            if known.get(name) != stamps[name]:
                tokens = name in ("train.bin", "held-out.bin")
                _check_file(folder / name, files[name], dtype if tokens else None, vocabulary)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(stamps, file)
        os.replace(file.name, path)


def _read_stamps(path: Path) -> dict[str, Any]:
    try:
        stamps: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stamps


def _check_file(
    path: Path,
    expected: dict[str, Any],
    dtype: np.dtype[np.unsignedinteger] | None,
    vocabulary: int,
) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            if (
                dtype is not None
                and (largest := int(np.frombuffer(block, dtype).max())) >= vocabulary
            ):
                raise CorpusError(
                    f"{path} holds the token {largest}: allowed are those below {vocabulary}, the "
                    "manifest's vocabulary"
                )
    if digest.hexdigest() != expected["sha256"]:
        raise CorpusError(f"{path} was edited: it has not the SHA-256 of the manifest")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a path, which lies in the cache folder."""
    lock = cache_folder() / "locks" / f"{_digest(path)}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
