"""The same documents as every kind of source, and what reading them back takes."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from isoloco_flwr.pretraining.corpus import open_source
from isoloco_flwr.pretraining.document import Document, Source
from isoloco_flwr.pretraining.tokens import Tokens

TOPICS = ("sea", "land", "air")
SPECIAL = "no end: <|endoftext|> </s> \x00 \r\n\u2028 🏝️ \U0010ffff"
"""What readers and tokenizers like to take for something else."""


def sample_texts(count: int = 120) -> list[str]:
    """Make documents that are all different, the first one odd, the second empty."""
    own = [f"Text {number} – ” é\n" * (1 + number % 7) for number in range(2, count)]
    return [SPECIAL, "", *own]


def sample_labels(count: int = 120) -> list[str]:
    return [TOPICS[number % 3] for number in range(count)]


def read_all(source: Source) -> list[Document]:
    """Read all parts of a source, one after the other."""
    return [document for part in range(source.num_parts()) for document in source.documents(part)]


def documents_of(tokens: Tokens) -> list[tuple[int, ...]]:
    """Cut tokens, those held out too, back into documents, in no order."""
    cut = []
    for side in (tokens.train, tokens.held_out):
        ends = np.flatnonzero(side == tokens.end_of_text)
        assert ends[-1] == len(side) - 1
        cut += [tuple(map(int, part[:-1])) for part in np.split(side, ends + 1)[:-1]]
    return sorted(cut)


def write_txt(texts: Sequence[str], labels: Sequence[str], folder: Path) -> dict[str, str]:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:05d}.txt").write_bytes(text.encode())
    return {"source_name": str(folder)}


def write_parquet(texts: Sequence[str], labels: Sequence[str], folder: Path) -> dict[str, str]:
    folder.mkdir()
    _parquet_files(texts, labels, folder, "part")
    return {"source_name": str(folder), "text_column": "body", "label_column": "topic"}


def write_jsonl(texts: Sequence[str], labels: Sequence[str], folder: Path) -> dict[str, str]:
    return _json_lines(texts, labels, folder, "", lambda data: data)


def write_jsonl_gz(texts: Sequence[str], labels: Sequence[str], folder: Path) -> dict[str, str]:
    return _json_lines(texts, labels, folder, ".gz", gzip.compress)


def write_jsonl_zst(texts: Sequence[str], labels: Sequence[str], folder: Path) -> dict[str, str]:
    return _json_lines(texts, labels, folder, ".zst", zstandard.ZstdCompressor().compress)


def write_repository(texts: Sequence[str], labels: Sequence[str], folder: Path) -> dict[str, str]:
    """Write a Hugging Face dataset of two configurations and two splits."""
    splits = {"island": texts, "mainland": ["not asked for"] * 3}
    for config in ("wanted", "other"):
        (folder / config).mkdir(parents=True)
        for split, own in splits.items():
            own = own if config == "wanted" else ["not asked for"] * 3
            _parquet_files(own, labels[: len(own)], folder / config, split)
    card = ["---", "configs:"]
    for config in ("wanted", "other"):
        card += [f"- config_name: {config}", "  data_files:"]
        card += [f"  - {{split: {split}, path: '{config}/{split}-*'}}" for split in splits]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    return {
        "source_name": str(folder),
        "dataset_config": "wanted",
        "split": "island",
        "text_column": "body",
        "label_column": "topic",
    }


WRITERS: dict[str, Callable[[Sequence[str], Sequence[str], Path], dict[str, str]]] = {
    "txt": write_txt,
    "parquet": write_parquet,
    "jsonl": write_jsonl,
    "jsonl.gz": write_jsonl_gz,
    "jsonl.zst": write_jsonl_zst,
    "repository": write_repository,
}
"""By the kind of source: write documents to a new folder, return what `load_tokens` takes."""


def opened(arguments: dict[str, str]) -> Source:
    """Open a source with the arguments that `load_tokens` takes."""
    arguments = dict(arguments)
    return open_source(arguments.pop("source_name"), **arguments)


def _halves(texts: Sequence[str], labels: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    middle = len(texts) // 2
    return [
        (list(texts[:middle]), list(labels[:middle])),
        (list(texts[middle:]), list(labels[middle:])),
    ]


def _parquet_files(texts: Sequence[str], labels: Sequence[str], folder: Path, name: str) -> None:
    for number, (body, topic) in enumerate(_halves(texts, labels)):
        columns = {"body": pa.array(body, pa.string()), "topic": pa.array(topic, pa.string())}
        pq.write_table(pa.table(columns), folder / f"{name}-{number}.parquet")


def _json_lines(
    texts: Sequence[str],
    labels: Sequence[str],
    folder: Path,
    ending: str,
    compress: Callable[[bytes], bytes],
) -> dict[str, str]:
    folder.mkdir()
    for number, half in enumerate(_halves(texts, labels)):
        rows = (
            json.dumps({"body": text, "topic": label}) for text, label in zip(*half, strict=True)
        )
        data = "".join(f"{row}\n" for row in rows).encode()
        (folder / f"part-{number}.jsonl{ending}").write_bytes(compress(data))
    return {"source_name": str(folder), "text_column": "body", "label_column": "topic"}
