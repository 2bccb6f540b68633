"""Sources with columns, through the readers of `datasets`: parquet, jsonl, Hugging Face."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from isoloco_flwr.pretraining.document import CorpusError, Document

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]
    from datasets import IterableDataset  # type: ignore[import-untyped]

__all__ = ["ENDINGS", "FileRows", "RepositoryRows"]

ENDINGS = {
    ".txt": "txt",
    ".parquet": "parquet",
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".jsonl.zst": "json",
}
"""Kinds of files by the ends of their names; `datasets` has a reader for each but txt."""

_BATCH = 1000
"""Rows that are turned into Python's texts at a time."""


@dataclass(frozen=True)
class FileRows:
    """Rows of parquet or jsonl files, a part a file."""

    source: str
    """The source as it was named, for errors."""
    identity: str
    """Names the cache, see `Source`."""
    kind: str
    """Reader in `datasets`: parquet or json."""
    files: tuple[tuple[str, Path], ...]
    """Names and paths."""
    text_column: str
    """Column of the text."""
    label_column: str
    """Column of the labels, "" for none."""

    def num_parts(self) -> int:
        """Return how many files there are."""
        return len(self.files)

    def documents(self, part: int) -> Iterator[Document]:
        """Read the rows of a file, see `Source`."""
        name, path = self.files[part]

        def tables() -> Iterator["tuple[pa.Table, Any]"]:
            if path.stat().st_size:  # the readers want at least one row
                # Square brackets and stars in a path mean themselves.
                files = [glob.escape(str(path))]
                yield from _tables(_load(self.kind, data_files=files, split="train"))

        yield from _documents(self, name, f"data.source = {self.source!r}, {name}", tables())


@dataclass(frozen=True)
class RepositoryRows:
    """Rows of a Hugging Face dataset, streamed, a part a shard of it."""

    source: str
    """The source as it was named, for errors."""
    repository: str
    """Its name on the hub, or the folder of a copy."""
    dataset_config: str
    """Its configuration, "" for the only or the default one."""
    split: str
    """Its split."""
    text_column: str
    """Column of the text."""
    label_column: str
    """Column of the labels, "" for none."""

    @property
    def identity(self) -> str:
        """Names the cache by what was asked for: finding it again takes no network."""
        return " ".join((repr(self), *_stamps(Path(self.repository))))

    def num_parts(self) -> int:
        """Return how many shards there are."""
        shards: int = self._dataset().num_shards
        return shards

    def documents(self, part: int) -> Iterator[Document]:
        """Read the rows of a shard, see `Source`."""
        dataset = self._dataset()
        shard = dataset.shard(num_shards=dataset.num_shards, index=part)
        where = f"data.source = {self.source!r}, shard {part}"
        yield from _documents(self, str(part), where, _tables(shard))

    def _dataset(self) -> "IterableDataset":
        try:
            return _open_repository(self.repository, self.dataset_config, self.split)
        except Exception as error:  # of datasets, the hub, the network, the readers
            raise CorpusError(
                f"data.source = {self.source!r} with data.dataset-config = "
                f"{self.dataset_config!r} and data.split = {self.split!r}: allowed is what "
                f"datasets.load_dataset opens ({_reason(error)})"
            ) from error


def _documents(
    source: FileRows | RepositoryRows,
    name: str,
    where: str,
    tables: "Iterator[tuple[pa.Table, Any]]",
) -> Iterator[Document]:
    """Turn rows into documents; a row without text (null) is none."""
    row = 0
    try:
        for table, features in tables:
            texts = _text(table, source.text_column, where)
            labels = _labels(table, features, source.label_column, where)
            for text, label in zip(texts, labels, strict=True):
                if text is not None:
                    yield Document(f"{name}:{row}", text, label)
                row += 1
    except CorpusError:
        raise
    except UnicodeDecodeError as error:
        raise CorpusError(f"{where} is not UTF-8 text: {error}") from error
    except Exception as error:  # of datasets, the network, the readers
        raise CorpusError(f"{where} cannot be read: {_reason(error)}") from error


def _text(table: "pa.Table", column: str, where: str) -> list[str | None]:
    import pyarrow as pa

    values = _column(table, "text", column, where)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise CorpusError(
            f"data.text-column = {column!r}: allowed is a column of text, in {where} it holds "
            f"{values.type}"
        )
    texts: list[str | None] = values.to_pylist()
    return texts


def _labels(table: "pa.Table", features: Any, column: str, where: str) -> list[str]:
    import pyarrow as pa

    if not column:
        return [""] * len(table)
    values = _column(table, "label", column, where)
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer)
    if not any(kind(values.type) for kind in (*kinds, pa.types.is_boolean, pa.types.is_null)):
        raise CorpusError(
            f"data.label-column = {column!r}: allowed is a column of text, whole numbers or "
            f"true and false, in {where} it holds {values.type}"
        )
    names = getattr((features or {}).get(column), "names", None)  # of a ClassLabel
    return [
        "" if value is None else names[value] if names else str(value)
        for value in values.to_pylist()
    ]


def _column(table: "pa.Table", key: str, column: str, where: str) -> "pa.ChunkedArray":
    if column not in table.column_names:
        raise CorpusError(
            f"data.{key}-column = {column!r}: {where} has no such column, allowed is one of "
            f"{', '.join(table.column_names)}"
        )
    return table.column(column)


def _tables(dataset: "IterableDataset") -> "Iterator[tuple[pa.Table, Any]]":
    for table in dataset.with_format("arrow").iter(batch_size=_BATCH):
        yield table, dataset.features


@lru_cache(maxsize=1)
def _open_repository(repository: str, dataset_config: str, split: str) -> "IterableDataset":
    return _load(repository, dataset_config or None, split=split)


def _load(*arguments: Any, **options: Any) -> "IterableDataset":
    # Imported late: it takes seconds, and most runs read their tokens from a cache.
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset(*arguments, streaming=True, **options)


def _stamps(folder: Path) -> list[str]:
    """Return sizes and times of a local copy's files; a name on the hub has none."""
    if not folder.is_absolute():
        return []
    return sorted(
        f"{path.relative_to(folder)} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in folder.rglob("*")
        if path.is_file()
    )


def _reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".replace(os.linesep, " ")
    return shorten(text, 240, placeholder=" ...")
