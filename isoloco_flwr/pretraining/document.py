"""What every source of text gives: documents, in parts that can be read one by one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

__all__ = ["CorpusError", "Document", "Source"]


class CorpusError(ValueError):
    """A source that is not there, or is not what it should be."""


@dataclass(frozen=True)
class Document:
    """One text, which is never split between training and held-out."""

    name: str
    """Unique in its source; decides the side it falls on."""
    text: str
    """The text itself."""
    label: str = ""
    """What a partitioner sorts it by, where the source has labels."""


class Source(Protocol):
    """A corpus; can be pickled."""

    @property
    def identity(self) -> str:
        """Changes whenever the documents may have changed: names the cache of their tokens."""

    def num_parts(self) -> int:
        """Return how many parts can be read apart from one another."""

    def documents(self, part: int) -> Iterator[Document]:
        """Read the documents of a part, always the same in the same order.

        Raises
        ------
        CorpusError
            If they cannot be read.
        """
