"""Making token files of a source: part by part, in parallel, going on where it was cut."""

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from isoloco_flwr.pretraining.document import CorpusError, Document, Source
from isoloco_flwr.pretraining.join import SIDES, join
from isoloco_flwr.pretraining.tokenizer import TextTokenizer, load_tokenizer

__all__ = ["FORMAT", "Progress", "build", "is_held_out", "unfinished"]

FORMAT = "isoloco_flwr tokens 2"

HELD_OUT_SHARE = 0.04
"""Share of the documents, by the hash of their names, that is never trained on."""

_BATCH_CHARACTERS = 1 << 20
"""Text that is tokenized at a time."""


@dataclass(frozen=True)
class Progress:
    """How far `build` is."""

    parts: int
    """Parts that are done."""
    all_parts: int
    """Parts of the source."""
    tokens: int
    """Tokens written, those of parts that are not done among them."""


def is_held_out(name: str) -> bool:
    """Tell whether a document is held out, by a hash of its name alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < HELD_OUT_SHARE * 2**64


def build(
    source: Source,
    tokenizer: TextTokenizer,
    folder: Path,
    *,
    about: dict[str, Any],
    processes: int = 0,
    stop_after: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Tokenize a source into a folder, which appears when all is done.

    Parameters
    ----------
    source : Source
        The documents.
    tokenizer : TextTokenizer
        What makes tokens of them.
    folder : Path
        What is made. Until then, `folder.unfinished` beside it holds the parts that are done, which
        are not made again; at the end, the disk holds all tokens twice for a while.
    about : dict[str, Any]
        Goes into the manifest.
    processes : int
        Processes that take a part each; 0 works in this one.
    stop_after : int, optional
        Tokens, in the order of the parts and documents, after which no document is taken.
    on_progress : Callable[[Progress], None]
        Called about twice a second where there are processes.

    Raises
    ------
    CorpusError
        If the source cannot be read, has no document to train on or none to hold out,
        `folder.unfinished` was made from something else, or a process was ended.
    TokenizerError
        If a token is beyond the vocabulary.
    """
    work = unfinished(folder)
    plan = {
        "format": FORMAT,
        "source": source.identity,
        "tokenizer": tokenizer.identity,
        "stop-after": stop_after,
    }
    _check_plan(work, plan)
    for left in (*work.glob("*.part"), *work.glob("joined")):  # by a process that was killed
        shutil.rmtree(left)
    parts = _tokenize(source, tokenizer, work, processes, stop_after, on_progress)
    joined = work / "joined"
    joined.mkdir()
    manifest = {"format": FORMAT, **about, "stop-after": stop_after}
    manifest |= join(parts, joined, tokenizer, bool(about["label-column"]), stop_after)
    for side in SIDES:
        if not manifest[side]["documents"]:
            total = sum(manifest[side]["documents"] for side in SIDES)
            raise CorpusError(
                f"data.source = {about['source']!r}: none of its {total} documents is "
                f"{'held out' if side == 'held-out' else 'to train on'}; about 4 in 100 are "
                "held out by a hash of their names, so it takes more text"
                if total
                else f"data.source = {about['source']!r} holds no document: allowed is a source "
                "with text"
            )
    tokenizer.save_pretrained(joined / "tokenizer")
    (joined / "manifest.json").write_text(json.dumps(manifest, indent=2))
    os.replace(joined, folder)
    shutil.rmtree(work)


def unfinished(folder: Path) -> Path:
    """Return where the parts of a folder's tokens lie until all is done."""
    return folder.with_name(f"{folder.name}.unfinished")


def _check_plan(work: Path, plan: dict[str, Any]) -> None:
    path = work / "plan.json"
    if not path.exists():
        # Parts without a plan were being deleted, and nobody knows what they were made of.
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        part = path.with_suffix(".new")
        part.write_text(json.dumps(plan))
        os.replace(part, path)
    elif json.loads(path.read_text()) != plan:
        raise CorpusError(
            f"{work} holds parts of another source, tokenizer or end: delete it, or take another "
            "output folder"
        )


def _tokenize(
    source: Source,
    tokenizer: TextTokenizer,
    work: Path,
    processes: int,
    stop_after: int | None,
    on_progress: Callable[[Progress], None],
) -> list[Path]:
    """Make the parts that are needed and missing; return the needed ones in order."""
    count = source.num_parts()
    done: list[Path] = []
    tokens = 0

    def enough() -> bool:
        return len(done) == count or (stop_after is not None and tokens >= stop_after)

    def close(part: Path) -> None:
        nonlocal tokens
        done.append(part)
        tokens += sum(_size(part / f"{side}.bin") for side in SIDES) // tokenizer.dtype.itemsize

    if not processes:
        while not enough():
            close(_write_part(source, tokenizer, work, stop_after, len(done)))
        return done
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(source, tokenizer.name, work, stop_after),
    )
    waiting: deque[Future[Path]] = deque()
    try:
        while not enough():
            # Some more than there are processes, so that none waits for a slow first part.
            while len(waiting) < 4 * processes and len(done) + len(waiting) < count:
                waiting.append(pool.submit(_work_on, len(done) + len(waiting)))
            wait([waiting[0]], timeout=0.5)
            if waiting[0].done():
                close(waiting.popleft().result())
            begun = sum(_size(path) for path in work.glob("*.part/*[nt].bin"))
            on_progress(Progress(len(done), count, tokens + begun // tokenizer.dtype.itemsize))
    except BrokenProcessPool as error:
        raise CorpusError(
            f"a process ended by itself, perhaps for want of memory: {work} keeps the parts that "
            f"are done, and the same goes on from there; allowed are fewer than {processes} "
            "processes too"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
    return done


def _start_worker(source: Source, tokenizer: str, work: Path, stop_after: int | None) -> None:
    global _work_on_part
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes take the cores
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    # Without this, a killed parent leaves processes that write beside those of the next start.
    threading.Thread(target=end_with_parent, daemon=True).start()
    _work_on_part = partial(_write_part, source, load_tokenizer(tokenizer), work, stop_after)


def _work_on(index: int) -> Path:
    return _work_on_part(index)


_work_on_part: Callable[[int], Path]
"""A pool process's own function, set by `_start_worker`."""


def _write_part(
    source: Source, tokenizer: TextTokenizer, work: Path, stop_after: int | None, index: int
) -> Path:
    """Tokenize a part into its folder, unless it is there."""
    folder = work / f"{index:07d}"
    if folder.exists():
        return folder
    begun = folder.with_suffix(".part")
    begun.mkdir()
    labels: dict[str, int] = {}
    tokens = 0
    names = ("train", "held-out", "documents", "labels")
    files = {name: (begun / f"{name}.bin").open("wb") for name in names}
    try:
        for batch in _batches(source.documents(index)):
            encoded = tokenizer.encode_batch([document.text for document in batch])
            for document, own in zip(batch, encoded, strict=True):
                held_out = is_held_out(document.name)
                whole = np.append(own, np.asarray(tokenizer.end_of_text, tokenizer.dtype))
                files[SIDES[held_out]].write(whole.tobytes())
                # A negative length is that of a document held out.
                length = np.int64(-len(whole) if held_out else len(whole))
                files["documents"].write(length.tobytes())
                if not held_out:
                    label = labels.setdefault(document.label, len(labels))
                    files["labels"].write(np.int32(label).tobytes())
                tokens += len(whole)
            if stop_after is not None and tokens >= stop_after:
                break
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    # On the disk as well before the folder's name says that all is there.
    with (begun / "labels.json").open("w") as names_file:
        json.dump(list(labels), names_file)
        names_file.flush()
        os.fsync(names_file.fileno())
    os.replace(begun, folder)
    return folder


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS or len(batch) == 1000:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a part was finished in this moment
        return 0
