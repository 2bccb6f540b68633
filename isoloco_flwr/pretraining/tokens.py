"""Tokens of a corpus as memory-mapped files that all processes of a machine share."""

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoloco_flwr.pretraining.corpus import CorpusError, Source, open_source
from isoloco_flwr.pretraining.tokenizer import END_OF_TEXT, VOCABULARY_SIZE, encode

__all__ = ["Tokens", "cache_folder", "is_held_out", "load_tokens"]

FORMAT = "isoloco_flwr byte tokens 1"

HELD_OUT_SHARE = 0.04
"""Share of the documents, by the hash of their names, that is never trained on."""

_SIDES = ("train", "held-out")


@dataclass(frozen=True)
class Tokens:
    """A tokenized corpus; every document is followed by the end-of-text token."""

    train: NDArray[np.uint16]
    """Tokens to train on: a read-only memory map."""
    held_out: NDArray[np.uint16]
    """Tokens to score models on: a read-only memory map."""
    manifest: dict[str, Any]
    """What they were made from, how many, and their checksums."""
    vocabulary_size: int = VOCABULARY_SIZE
    """Entries of the tokenizer's vocabulary."""
    train_documents: NDArray[np.int64] = dataclasses.field(
        default_factory=lambda: np.zeros(1, dtype=np.int64)
    )
    """Offsets of the documents: document i is train[o[i] : o[i + 1]]."""
    train_labels: NDArray[np.int32] | None = None
    """Index into `label_names` of every document, where the corpus is labelled."""
    label_names: tuple[str, ...] = ()
    """Labels by index."""


def cache_folder() -> Path:
    """Return the folder for what can be made again: $ISOLOCO_CACHE or ~/.cache/isoloco_flwr."""
    return Path(os.environ.get("ISOLOCO_CACHE") or "~/.cache/isoloco_flwr").expanduser()


def is_held_out(name: str) -> bool:
    """Tell whether a document is held out, by a hash of its name alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < HELD_OUT_SHARE * 2**64


def load_tokens(
    source_name: str,
    *,
    tokenizer: str = "bytes",
    dataset_config: str = "",
    split: str = "train",
    text_column: str = "text",
    label_column: str = "",
) -> Tokens:
    """Return the tokens of a source, made on first use and read from the cache afterwards.

    Parameters
    ----------
    source_name : str
        See `isoloco_flwr.pretraining.corpus.open_source`.

    Raises
    ------
    CorpusError
        If the source is not there, has no document to train on or none to hold out, or is damaged.

    Notes
    -----
    Processes that start together make the cache once: the first holds a lock, writes into a folder
    aside and renames it. A cache whose files do not have their manifest's sizes and checksums is
    made anew, so that every token is one of the tokenizer's.
    """
    source = open_source(source_name)
    identity = f"{FORMAT} {source.identity}"
    folder = cache_folder() / "tokens" / hashlib.sha256(identity.encode()).hexdigest()[:24]
    manifest = _read_manifest(folder)
    if manifest is None:
        with _lock(folder.with_suffix(".lock")):
            manifest = _read_manifest(folder)
            if manifest is None:
                manifest = _build(source, source_name, folder)
    train, held_out = (
        np.memmap(folder / f"{side}.bin", dtype=np.uint16, mode="r") for side in _SIDES
    )
    return Tokens(train=train, held_out=held_out, manifest=manifest)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a whole cache, None where there is none."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        for side in _SIDES:
            path = folder / f"{side}.bin"
            if path.stat().st_size != 2 * manifest[side]["tokens"]:
                return None
            if _checksum(path) != manifest[side]["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest


def _build(source: Source, source_name: str, folder: Path) -> dict[str, Any]:
    for left in folder.parent.glob(f"{folder.name}.part-*"):  # by a process that was killed
        shutil.rmtree(left)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.part-"))
    try:
        counts = {side: {"tokens": 0, "documents": 0} for side in _SIDES}
        with (part / "train.bin").open("wb") as train, (part / "held-out.bin").open("wb") as held:
            for document in source.documents():
                side, file = ("held-out", held) if is_held_out(document.name) else ("train", train)
                tokens = np.append(encode(document.text), np.uint16(END_OF_TEXT))
                file.write(tokens.tobytes())
                counts[side]["tokens"] += len(tokens)
                counts[side]["documents"] += 1
        for side in _SIDES:
            if not counts[side]["documents"]:
                raise CorpusError(
                    f"data.source = {source_name!r}: none of its "
                    f"{sum(count['documents'] for count in counts.values())} documents is "
                    f"{'held out' if side == 'held-out' else 'to train on'}; about 4 in 100 are "
                    "held out by a hash of their names, so it takes more text"
                )
        manifest = {
            "format": FORMAT,
            "source": source_name,
            "identity": source.identity,
            "vocabulary": VOCABULARY_SIZE,
            **{
                side: {**counts[side], "sha256": _checksum(part / f"{side}.bin")} for side in _SIDES
            },
        }
        (part / "manifest.json").write_text(json.dumps(manifest, indent=2))
        shutil.rmtree(folder, ignore_errors=True)
        part.chmod(0o755)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return manifest


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
