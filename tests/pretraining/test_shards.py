"""Token files: whole documents in order, the same of every kind of source, checked on load."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_sources import WRITERS, documents_of, opened, read_all, sample_labels, sample_texts

from isoloco_flwr.pretraining.corpus import CorpusError
from isoloco_flwr.pretraining.document import Document
from isoloco_flwr.pretraining.shards import Progress, is_held_out, unfinished
from isoloco_flwr.pretraining.tokenizer import TokenizerError, load_tokenizer, train_bpe
from isoloco_flwr.pretraining.tokens import load_tokens, open_tokens, prepare_tokens

NAMES = {
    side: [name for name in map("name {}".format, range(400)) if is_held_out(name) is side]
    for side in (False, True)
}
"""Names of documents to train on, and of some that are held out."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ISOLOCO_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(sample_texts(), 400).save_pretrained(folder)
    return str(folder)


@dataclasses.dataclass(frozen=True)
class GivenDocuments:
    """A source of documents that are at hand."""

    parts: tuple[tuple[Document, ...], ...]
    identity: str = "given"

    def num_parts(self) -> int:
        return len(self.parts)

    def documents(self, part: int) -> Iterator[Document]:
        yield from self.parts[part]


def prepared(source, tokenizer, folder, *, label_column="", **options):
    """Prepare a source and open what came of it."""
    prepare_tokens(
        source,
        load_tokenizer(tokenizer),
        folder,
        name="given",
        label_column=label_column,
        **options,
    )
    return open_tokens(folder)


@st.composite
def parts(draw):
    """Documents of any text and length in parts, at least one of them on each side."""
    names = draw(st.permutations(NAMES[False][:12] + NAMES[True][:4]))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    documents = [Document(name, draw(text), draw(st.sampled_from("xyz"))) for name in names]
    cuts = sorted(draw(st.lists(st.integers(0, len(documents)), max_size=3)))
    bounds = [0, *cuts, len(documents)]
    return tuple(tuple(documents[begin:end]) for begin, end in itertools.pairwise(bounds))


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@given(parts=parts())
@settings(deadline=None, max_examples=25)
def test_documents_come_back_from_their_tokens(kind, parts, bpe, tmp_path_factory):
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else bpe)
    folder = tmp_path_factory.mktemp("shards") / "tokens"
    tokens = prepared(GivenDocuments(parts), tokenizer.name, folder, label_column="of given")
    documents = [document for part in parts for document in part]
    train = [document for document in documents if not is_held_out(document.name)]
    offsets = tokens.train_documents
    own = [tokens.train[begin:end] for begin, end in itertools.pairwise(offsets)]
    assert all(document[-1] == tokens.end_of_text for document in own)
    assert [tokenizer.decode(document[:-1]) for document in own] == [one.text for one in train]
    assert [tokens.label_names[label] for label in tokens.train_labels] == [
        one.label for one in train
    ]
    held_out = tokenizer.decode(tokens.held_out).split(tokenizer.pretrained.eos_token)
    assert "".join(held_out) == "".join(
        document.text for document in documents if is_held_out(document.name)
    )
    assert not unfinished(folder).exists()


def expected_documents(tokenizer):
    return sorted(
        tuple(map(int, tokens)) for tokens in load_tokenizer(tokenizer).encode_batch(sample_texts())
    )


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_same_documents_in_every_form_give_the_same_tokens(kind, tokenizer, bpe, tmp_path):
    tokenizer = bpe if tokenizer == "bpe" else tokenizer
    arguments = WRITERS[kind](sample_texts(), sample_labels(), tmp_path / "source")
    tokens = load_tokens(**arguments, tokenizer=tokenizer)
    assert documents_of(tokens) == expected_documents(tokenizer)
    train = [one for one in read_all(opened(arguments)) if not is_held_out(one.name)]
    lengths = [
        len(own) + 1 for own in load_tokenizer(tokenizer).encode_batch([d.text for d in train])
    ]
    np.testing.assert_array_equal(np.diff(tokens.train_documents), lengths)
    if kind == "txt":
        assert tokens.train_labels is None
    else:
        assert [tokens.label_names[label] for label in tokens.train_labels] == [
            document.label for document in train
        ]
    # And what prepare writes of it is the same once more.
    folder = tmp_path / "prepared"
    label_column = arguments.get("label_column", "")
    prepared(opened(arguments), tokenizer, folder, label_column=label_column)
    again = load_tokens(str(folder))
    np.testing.assert_array_equal(again.train, tokens.train)
    np.testing.assert_array_equal(again.held_out, tokens.held_out)
    assert again.label_names == tokens.label_names
    assert (again.vocabulary_size, again.end_of_text) == (
        tokens.vocabulary_size,
        tokens.end_of_text,
    )


def labelled(names, label):
    return tuple(Document(name, f"{name} text", label) for name in names)


SMALL = GivenDocuments(
    (
        labelled(NAMES[True][:2] + NAMES[False][:40], "x"),
        labelled(NAMES[False][40:50] + NAMES[True][2:5], "y") + labelled(NAMES[False][50:60], "z"),
    )
)
"""About 560 and 320 tokens, some of them held out."""


@pytest.fixture
def folder(tmp_path):
    prepared(SMALL, "bytes", tmp_path / "tokens", label_column="kind")
    return tmp_path / "tokens"


FILES = ["train.bin", "held-out.bin", "train-documents.bin", "train-labels.bin", "label-names.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_is_named_with_its_size_and_the_one_allowed(name, folder):
    size = (folder / name).stat().st_size
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    with pytest.raises(
        CorpusError, match=rf"tokens/{name} has {size - 1} bytes: allowed are the {size} of the man"
    ):
        load_tokens(str(folder))


@pytest.mark.parametrize("name", FILES)
def test_an_edited_file_of_the_right_size_is_named(name, folder):
    load_tokens(str(folder))  # what was checked before is checked again
    data = bytearray((folder / name).read_bytes())
    data[4] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(CorpusError, match=rf"tokens/{name} was edited"):
        load_tokens(str(folder))


@pytest.mark.parametrize("name", ["train.bin", "held-out.bin"])
def test_a_token_beyond_the_vocabulary_is_named(name, folder):
    data = np.fromfile(folder / name, np.uint16)
    data[3] = 257
    data.tofile(folder / name)
    with pytest.raises(
        CorpusError, match=rf"tokens/{name} holds the token 257: allowed are those below 257"
    ):
        load_tokens(str(folder))


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_missing_file_is_named(name, folder):
    (folder / name).unlink()
    if name == "manifest.json":  # then it is no folder that prepare wrote
        with pytest.raises(CorpusError, match=r"data\.source = .*allowed is one of"):
            load_tokens(str(folder))
    else:
        with pytest.raises(CorpusError, match=rf"manifest.json is damaged.*{name}"):
            load_tokens(str(folder))


def change_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "isoloco_flwr tokens 1"}, r"format 'isoloco_flwr tokens 1': allowed is '.* 2'"),
        ({"dtype": "float32"}, "manifest.json is damaged: allowed is what prepare wrote"),
        ({"dtype": "uint32"}, "its numbers contradict one another"),
        ({"files": {}}, "manifest.json is damaged"),
        ({"train": {"tokens": 5, "documents": 60}}, "its numbers contradict one another"),
        ({"vocabulary": 200}, "holds the token 256: allowed are those below 200"),
        ({"vocabulary": None}, "manifest.json is damaged"),
    ],
)
def test_an_edited_manifest_is_refused(changes, message, folder):
    change_manifest(folder, **changes)
    with pytest.raises(CorpusError, match=message):
        load_tokens(str(folder))


def test_a_manifest_that_is_no_json_is_refused(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:-2])
    with pytest.raises(CorpusError, match=r"manifest.json is damaged"):
        load_tokens(str(folder))


def test_a_prepared_folder_keeps_its_tokenizer_and_its_labels(folder, bpe):
    with pytest.raises(CorpusError, match=r"data\.tokenizer = .*prepared with 'bytes', allowed"):
        load_tokens(str(folder), tokenizer=bpe)
    with pytest.raises(CorpusError, match=r"data\.label-column = 'other': .*'kind', allowed"):
        load_tokens(str(folder), label_column="other")
    assert load_tokens(str(folder), label_column="kind").label_names == ("x", "y", "z")


def test_a_prepared_folder_may_move_and_its_tokenizer_is_in_it(bpe, tmp_path):
    prepared(SMALL, bpe, tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    tokens = load_tokens(str(tmp_path / "after"), tokenizer=bpe)
    assert tokens.tokenizer == str(tmp_path / "after" / "tokenizer")
    assert load_tokenizer(tokens.tokenizer).identity == load_tokenizer(bpe).identity


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "'given' holds no document: allowed is a source with text"),
        (NAMES[False][:3], "none of its 3 documents is held out"),
        (NAMES[True][:3], "none of its 3 documents is to train on"),
    ],
)
def test_a_side_without_a_document_is_an_error(names, message, tmp_path):
    source = GivenDocuments((tuple(Document(name, "text") for name in names),))
    with pytest.raises(CorpusError, match=message):
        prepared(source, "bytes", tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("stop_after", [40, 500, 640, 10**9])
def test_no_document_is_taken_after_so_many_tokens(stop_after, tmp_path):
    everything = prepared(SMALL, "bytes", tmp_path / "all", label_column="kind")
    documents = [document for part in SMALL.parts for document in part]
    ends = np.cumsum([len(document.text.encode()) + 1 for document in documents])
    taken = documents[: np.searchsorted(ends, stop_after) + 1]
    train = [document for document in taken if not is_held_out(document.name)]
    some = prepared(SMALL, "bytes", tmp_path / "some", label_column="kind", stop_after=stop_after)
    assert some.manifest["train"]["documents"] == len(train)
    np.testing.assert_array_equal(some.train, everything.train[: len(some.train)])
    np.testing.assert_array_equal(some.held_out, everything.held_out[: len(some.held_out)])
    assert len(some.train) + len(some.held_out) == ends[len(taken) - 1]
    assert set(some.label_names) == {document.label for document in train}


@dataclasses.dataclass(frozen=True)
class Breaking(GivenDocuments):
    """Documents of which a part cannot be read; it says which parts were."""

    broken: int = -1
    read: list[int] = dataclasses.field(default_factory=list)

    def documents(self, part: int) -> Iterator[Document]:
        self.read.append(part)
        if part == self.broken:
            raise CorpusError("the network is gone")
        yield from super().documents(part)


def test_what_was_done_before_an_error_is_not_made_again(tmp_path):
    parts = tuple((document,) for part in SMALL.parts for document in part)
    breaking = Breaking(parts, broken=30)
    with pytest.raises(CorpusError, match="the network is gone"):
        prepared(breaking, "bytes", tmp_path / "tokens")
    assert breaking.read == list(range(31))
    whole = Breaking(parts)
    tokens = prepared(whole, "bytes", tmp_path / "tokens")
    assert whole.read == list(range(30, 65))
    np.testing.assert_array_equal(
        tokens.train, prepared(SMALL, "bytes", tmp_path / "at once").train
    )


def test_parts_of_something_else_are_not_gone_on_with(tmp_path):
    folder = tmp_path / "tokens"
    broken = dataclasses.replace(SMALL, parts=((Document("name", "\ud800"),),))
    with pytest.raises(UnicodeEncodeError):
        prepared(broken, "bytes", folder)
    with pytest.raises(CorpusError, match=r"tokens.unfinished holds parts of another.*delete it"):
        prepared(dataclasses.replace(SMALL, identity="other"), "bytes", folder)
    with pytest.raises(CorpusError, match=r"tokens.unfinished holds parts of another"):
        prepared(SMALL, "bytes", folder, stop_after=5)


def test_a_folder_that_holds_something_is_never_replaced(tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(OSError, match="not empty"):
        prepared(SMALL, "bytes", folder)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_a_token_beyond_the_vocabulary_ends_the_making(bpe, tmp_path):
    tokenizer = dataclasses.replace(load_tokenizer(bpe), vocabulary_size=100)
    with pytest.raises(TokenizerError, match=r"data\.tokenizer = .*allowed are those below 100"):
        prepare_tokens(SMALL, tokenizer, tmp_path / "tokens", name="given", label_column="")
    assert not (tmp_path / "tokens").exists()


def test_progress_of_processes_ends_with_all_parts(tmp_path):
    arguments = WRITERS["jsonl"](sample_texts(), sample_labels(), tmp_path / "source")
    seen: list[Progress] = []
    tokens = prepared(
        opened(arguments), "bytes", tmp_path / "tokens", processes=1, on_progress=seen.append
    )
    assert seen[-1] == Progress(2, 2, len(tokens.train) + len(tokens.held_out))
    assert [one.tokens for one in seen] == sorted(one.tokens for one in seen)
