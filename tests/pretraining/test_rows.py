"""Rows of every kind of file and of a Hugging Face dataset: the same documents, or one line."""

import gzip
import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from text_sources import WRITERS, opened, read_all, sample_labels, sample_texts

from isoloco_flwr.pretraining.corpus import CorpusError, open_source

WITH_COLUMNS = [kind for kind in WRITERS if kind != "txt"]


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_source_gives_the_same_documents(kind, tmp_path):
    source = opened(WRITERS[kind](sample_texts(), sample_labels(), tmp_path / "source"))
    documents = read_all(source)
    assert [document.text for document in documents] == sample_texts()
    assert [document.label for document in documents] == (
        [""] * 120 if kind == "txt" else sample_labels()
    )
    assert len({document.name for document in documents}) == 120
    if kind != "txt":  # a folder of texts has one part for each 64 MB
        assert source.num_parts() == 2
    assert read_all(pickle.loads(pickle.dumps(source))) == documents


@pytest.mark.parametrize("kind", WRITERS)
def test_edited_files_have_another_identity(kind, tmp_path):
    arguments = WRITERS[kind](sample_texts(), sample_labels(), tmp_path / "source")
    before = opened(arguments).identity
    assert opened(arguments).identity == before
    path = max(path for path in (tmp_path / "source").rglob("*") if path.is_file())
    path.write_bytes(path.read_bytes() + b"x")
    assert opened(arguments).identity != before


def test_a_row_without_text_is_no_document_and_the_names_of_the_others_stay(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", None, "", "b")))
    documents = read_all(open_source(str(path)))
    assert [(document.name, document.text) for document in documents] == [
        ("rows.jsonl:0", "a"),
        ("rows.jsonl:2", ""),
        ("rows.jsonl:3", "b"),
    ]


def test_an_empty_file_among_others_has_no_documents(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "full.jsonl").write_text('{"text": "a"}\n')
    assert [document.text for document in read_all(open_source(str(tmp_path)))] == ["a"]


def test_brackets_and_stars_in_a_path_mean_themselves(tmp_path):
    folder = tmp_path / "[ab] *"
    folder.mkdir()
    (tmp_path / "a").mkdir()
    for place in (folder, tmp_path / "a"):
        (place / "t.jsonl").write_text(json.dumps({"text": place.name}) + "\n")
    assert [document.text for document in read_all(open_source(str(folder)))] == ["[ab] *"]


def test_labels_may_be_numbers_booleans_missing_or_have_names(tmp_path):
    features = {
        "text": Value("string"),
        "number": Value("int64"),
        "yes": Value("bool"),
        "name": ClassLabel(names=["first", "second"]),
    }
    columns = {"text": ["a", "b"], "number": [7, None], "yes": [True, False], "name": [1, 0]}
    Dataset.from_dict(columns, Features(features)).to_parquet(tmp_path / "t.parquet")
    expected = {"number": ["7", ""], "yes": ["True", "False"], "name": ["second", "first"]}
    for column, labels in expected.items():
        documents = read_all(open_source(str(tmp_path), label_column=column))
        assert [document.label for document in documents] == labels


@pytest.mark.parametrize("kind", WITH_COLUMNS)
@pytest.mark.parametrize("key", ["text", "label"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(kind, key, tmp_path):
    arguments = WRITERS[kind](sample_texts(), sample_labels(), tmp_path / "source")
    source = opened({**arguments, f"{key}_column": "missing"})
    with pytest.raises(
        CorpusError, match=rf"data\.{key}-column = 'missing': .*allowed is one of body, topic"
    ):
        read_all(source)


def test_columns_of_other_types_are_refused(tmp_path):
    pq.write_table(pa.table({"n": [1.5], "text": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises(CorpusError, match=r"data\.text-column = 'n': allowed is .*text.*double"):
        read_all(open_source(str(tmp_path), text_column="n"))
    with pytest.raises(CorpusError, match=r"data\.label-column = 'n': allowed is .*double"):
        read_all(open_source(str(tmp_path), label_column="n"))


@pytest.mark.parametrize("change", [{"split": "continent"}, {"dataset_config": "unknown"}])
def test_a_split_or_configuration_that_is_not_there_is_named(change, tmp_path):
    arguments = WRITERS["repository"](sample_texts(), sample_labels(), tmp_path / "source")
    [value] = change.values()
    with pytest.raises(CorpusError, match=rf"data\.source.*= '{value}'.*allowed is what .*opens"):
        read_all(opened({**arguments, **change}))


@pytest.mark.parametrize("change", [{"split": "test"}, {"dataset_config": "any"}])
def test_a_file_has_no_split_and_no_configuration(change, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a"}\n')
    key = next(iter(change)).replace("_", "-")
    with pytest.raises(CorpusError, match=rf"data\.{key} = .*only Hugging Face datasets"):
        open_source(str(path), **change)


def damage_none(data):
    return b"this is nothing of the kind"


def damage_half(data):
    return data[: len(data) // 2]


@pytest.mark.parametrize("damage", [damage_none, damage_half])
@pytest.mark.parametrize("kind", WITH_COLUMNS)
def test_a_file_that_cannot_be_read_is_named_in_one_line(kind, damage, tmp_path):
    arguments = WRITERS[kind](sample_texts(4000), sample_labels(4000), tmp_path / "source")
    path = max(path for path in (tmp_path / "source").rglob("*-1*") if path.is_file())
    if kind == "repository":
        path = tmp_path / "source" / "wanted" / "island-1.parquet"
    path.write_bytes(damage(path.read_bytes()))
    where = "shard 1" if kind == "repository" else path.name
    with pytest.raises(CorpusError, match=rf"data\.source = .*{where} cannot be read") as error:
        read_all(opened(arguments))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_json_that_is_not_utf8_is_named(ending, tmp_path):
    path = tmp_path / f"t.jsonl{ending}"
    data = b'{"text": "\xff\xfe"}\n'
    path.write_bytes(gzip.compress(data) if ending else data)
    with pytest.raises(CorpusError, match=rf"t.jsonl{ending}"):
        read_all(open_source(str(path)))


def test_a_folder_of_several_kinds_is_refused_with_an_example_of_each(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(CorpusError, match=r"holds a\.txt and b\.jsonl: allowed is one kind"):
        open_source(str(tmp_path))
