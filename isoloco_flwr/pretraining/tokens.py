"""Tokens of a corpus as memory-mapped files that all processes of a machine share."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoloco_flwr.pretraining.cache import cache_folder, check_files, locked
from isoloco_flwr.pretraining.corpus import CorpusError, Source, open_source
from isoloco_flwr.pretraining.shards import FORMAT, Progress, build, is_held_out, unfinished
from isoloco_flwr.pretraining.tokenizer import (
    VOCABULARY_SIZE,
    TextTokenizer,
    TokenizerError,
    load_tokenizer,
)

__all__ = ["Tokens", "cache_folder", "is_held_out", "load_tokens", "open_tokens", "prepare_tokens"]
_DTYPES: dict[str, np.dtype[np.unsignedinteger]] = {
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
}


@dataclass(frozen=True)
class Tokens:
    """A tokenized corpus; every document is followed by the end-of-text token."""

    train: NDArray[np.unsignedinteger]
    """Tokens to train on, uint16 or uint32: a read-only memory map."""
    held_out: NDArray[np.unsignedinteger]
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
    """Labels by index, in the order in which they first appear."""
    end_of_text: int = VOCABULARY_SIZE - 1
    """Token behind every document."""
    tokenizer: str = "bytes"
    """What `load_tokenizer` takes for the tokenizer that made them."""


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
        See `isoloco_flwr.pretraining.corpus.open_source`; or a folder that `prepare` wrote, which
        has its own tokenizer and takes no column.
    tokenizer : str
        See `isoloco_flwr.pretraining.tokenizer.load_tokenizer`. With a folder that `prepare` wrote,
        "bytes" stands for that folder's own.
    dataset_config, split, text_column, label_column : str
        See `isoloco_flwr.pretraining.corpus.open_source`.

    Raises
    ------
    CorpusError
        If the source is not there, has no document to train on or none to hold out, is damaged, or
        was prepared otherwise than asked for here.
    TokenizerError
        If the tokenizer is unknown or unfit.

    Notes
    -----
    Processes that start together make the cache once: the first holds a lock and renames the folder
    when it is whole. A cache that does not have its manifest's sizes and checksums is made anew,
    one that `prepare` wrote is an error.
    """
    path = Path(source_name).expanduser()
    if path.is_absolute() and (path / "manifest.json").is_file():
        tokens = open_tokens(path)
        _check_prepared(tokens.manifest, source_name, tokenizer, label_column)
        return tokens
    source = open_source(
        source_name,
        dataset_config=dataset_config,
        split=split,
        text_column=text_column,
        label_column=label_column,
    )
    loaded = load_tokenizer(tokenizer)
    identity = f"{FORMAT} {source.identity} {loaded.identity}"
    folder = cache_folder() / "tokens" / hashlib.sha256(identity.encode()).hexdigest()[:24]
    with locked(folder):
        try:
            tokens = open_tokens(folder)
        except CorpusError:  # not there, or damaged
            shutil.rmtree(folder, ignore_errors=True)
        else:
            shutil.rmtree(unfinished(folder), ignore_errors=True)  # of a process that was killed
            return tokens
        try:
            prepare_tokens(source, loaded, folder, name=source_name, label_column=label_column)
        except (CorpusError, TokenizerError):
            shutil.rmtree(unfinished(folder))
            raise
        return open_tokens(folder)


def prepare_tokens(
    source: Source,
    tokenizer: TextTokenizer,
    folder: Path,
    *,
    name: str,
    label_column: str,
    processes: int = 0,
    stop_after: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Make the token files of a source, see `isoloco_flwr.pretraining.shards.build`."""
    about = {
        "source": name,
        "identity": source.identity,
        "label-column": label_column,
        "tokenizer": tokenizer.name,
        "tokenizer-identity": tokenizer.identity,
    }
    build(
        source,
        tokenizer,
        folder,
        about=about,
        processes=processes,
        stop_after=stop_after,
        on_progress=on_progress,
    )


def open_tokens(folder: Path) -> Tokens:
    """Open token files and check them.

    Parameters
    ----------
    folder : Path
        What `prepare_tokens` made.

    Raises
    ------
    CorpusError
        If the manifest is missing or damaged, or a file is not what it says.

    Notes
    -----
    Sizes are compared every time. Checksums, and that no token is beyond the vocabulary, are
    compared once: a stamp in the cache folder remembers size and time of change of each file that
    was read through, and only those that have changed since are read again.
    """
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CorpusError(
                f"{path} has the format {manifest['format']!r}: allowed is {FORMAT!r}"
            )
        dtype = _DTYPES[manifest["dtype"]]
        sizes = {
            "train.bin": manifest["train"]["tokens"] * dtype.itemsize,
            "held-out.bin": manifest["held-out"]["tokens"] * dtype.itemsize,
            "train-documents.bin": (manifest["train"]["documents"] + 1) * 8,
        }
        if labelled := bool(manifest["label-column"]):
            sizes |= {"train-labels.bin": manifest["train"]["documents"] * 4}
        files = manifest["files"]
        if any(files[name]["bytes"] != size for name, size in sizes.items()):
            raise ValueError("its numbers contradict one another")
        check_files(folder, files, dtype, manifest["vocabulary"])
        tokens = Tokens(
            train=np.memmap(folder / "train.bin", dtype, mode="r"),
            held_out=np.memmap(folder / "held-out.bin", dtype, mode="r"),
            manifest=manifest,
            vocabulary_size=manifest["vocabulary"],
            train_documents=np.memmap(folder / "train-documents.bin", np.int64, mode="r"),
            end_of_text=manifest["end-of-text"],
            tokenizer="bytes" if manifest["tokenizer"] == "bytes" else str(folder / "tokenizer"),
        )
        if labelled:
            labels = np.memmap(folder / "train-labels.bin", np.int32, mode="r")
            names = tuple(json.loads((folder / "label-names.json").read_text(encoding="utf-8")))
            tokens = dataclasses.replace(tokens, train_labels=labels, label_names=names)
    except CorpusError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"{path} is damaged: allowed is what prepare wrote ({type(error).__name__}: {error})"
        ) from error
    return tokens


def _check_prepared(
    manifest: dict[str, Any], source: str, tokenizer: str, label_column: str
) -> None:
    own_label = manifest["label-column"]
    if label_column not in ("", own_label):
        raise CorpusError(
            f"data.label-column = {label_column!r}: {source} was prepared with the label column "
            f"{own_label!r}, allowed is that"
        )
    own = manifest["tokenizer"]
    if (
        tokenizer not in ("bytes", own)
        and load_tokenizer(tokenizer).identity != manifest["tokenizer-identity"]
    ):
        raise CorpusError(
            f"data.tokenizer = {tokenizer!r}: {source} was prepared with {own!r}, allowed is that, "
            "or 'bytes', which leaves the choice to the folder"
        )
