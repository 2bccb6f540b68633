"""The command: the same files whatever happens in between, one line where something is wrong."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from text_sources import read_all, sample_labels, sample_texts, write_jsonl
from typer.testing import CliRunner

from isoloco_flwr.pretraining.corpus import open_source
from isoloco_flwr.pretraining.prepare import app, training_texts
from isoloco_flwr.pretraining.shards import is_held_out, unfinished
from isoloco_flwr.pretraining.tokenizer import load_tokenizer
from isoloco_flwr.pretraining.tokens import load_tokens, prepare_tokens

PAIRS = 12


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOLOCO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write two dozen files, enough text that making their tokens takes a while."""
    folder = tmp_path_factory.mktemp("source")
    texts = sample_texts(40)
    for number in range(PAIRS):
        own = [f"{number} {text * 60}" for text in texts]
        write_jsonl(own, sample_labels(40), folder / f"{number:02d}")
        for half in (0, 1):
            path = folder / f"{number:02d}" / f"part-{half}.jsonl"
            path.rename(folder / f"{number:02d}-{half}.jsonl")
        (folder / f"{number:02d}").rmdir()
    return folder


def command(*arguments: object) -> tuple[int, str]:
    """Run the command in this process; return its status and what it said."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def succeed(*arguments: object) -> str:
    status, said = command(*arguments)
    assert status == 0, said
    return said


def asked_for(source, tokenizer, output, *more):
    return (
        *("tokenize", "--source", source, "--tokenizer", tokenizer, "--output", output),
        *("--text-column", "body", "--label-column", "topic", *more),
    )


@pytest.fixture(scope="module")
def tokenizer(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    said = succeed(
        *("tokenizer", "--source", source, "--text-column", "body"),
        *("--vocabulary", 400, "--output", folder),
    )
    assert "entries, asked for were 400" in said
    assert f"data.tokenizer = {folder}" in said
    return folder


@pytest.fixture(scope="module")
def undisturbed(source, tokenizer, tmp_path_factory):
    """Prepare the source with one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "tokens"
    succeed(*asked_for(source, tokenizer, folder))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_two_processes_make_the_files_of_one(source, tokenizer, undisturbed, tmp_path):
    said = succeed(*asked_for(source, tokenizer, tmp_path / "tokens", "--processes", 2))
    assert contents(tmp_path / "tokens") == contents(undisturbed)
    tokens = load_tokens(str(undisturbed))
    documents = len(read_all(open_source(str(source), text_column="body")))
    assert (
        tokens.manifest["train"]["documents"] + tokens.manifest["held-out"]["documents"]
        == documents
        == 40 * PAIRS
    )
    assert f"train: {tokens.manifest['train']['documents']:,} documents" in said
    assert f"data.source = {tmp_path / 'tokens'}" in said


def test_killed_in_the_middle_and_started_again_it_makes_the_same_files(
    source, tokenizer, undisturbed, tmp_path
):
    folder = tmp_path / "tokens"
    arguments = map(str, asked_for(source, tokenizer, folder, "--processes", 2))
    process = subprocess.Popen(
        [sys.executable, "-m", "isoloco_flwr.pretraining.prepare", *arguments],
        stdout=subprocess.PIPE,
    )

    def done():
        return [path for path in unfinished(folder).glob("*") if path.name.isdigit()]

    try:
        deadline = time.monotonic() + 240
        while len(done()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.poll() is None
    finally:
        process.kill()
    # The processes that it had started hold its output open until they end by themselves.
    process.communicate(timeout=60)
    assert 3 <= len(done()) < 2 * PAIRS
    assert not folder.exists()
    succeed(*asked_for(source, tokenizer, folder, "--processes", 2))
    assert contents(folder) == contents(undisturbed)
    assert not unfinished(folder).exists()


def test_so_many_tokens_are_the_first_ones_however_many_processes(
    source, tokenizer, undisturbed, tmp_path
):
    everything = load_tokens(str(undisturbed))
    enough = len(everything.train) // 2
    more = ("--processes", 2, "--stop-after", enough)
    succeed(*asked_for(source, tokenizer, tmp_path / "two", *more))
    prepare_tokens(
        open_source(str(source), text_column="body", label_column="topic"),
        load_tokenizer(str(tokenizer)),
        tmp_path / "none",
        name=str(source),
        label_column="topic",
        stop_after=enough,
    )
    assert contents(tmp_path / "two") == contents(tmp_path / "none")
    some = load_tokens(str(tmp_path / "two"))
    longest = np.diff(everything.train_documents).max()
    assert enough <= len(some.train) + len(some.held_out) < enough + 2 * longest
    assert (some.train == everything.train[: len(some.train)]).all()
    assert (some.held_out == everything.held_out[: len(some.held_out)]).all()


def test_the_same_again_changes_nothing_and_anything_else_is_refused(
    source, tokenizer, undisturbed
):
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    assert "held-out: " in succeed(*asked_for(source, tokenizer, undisturbed))
    for other in (
        asked_for(source, "bytes", undisturbed),
        asked_for("sotu", tokenizer, undisturbed)[:-4],
        asked_for(source, tokenizer, undisturbed, "--stop-after", 9),
    ):
        other = tuple("era" if part == "topic" else part for part in other)
        status, said = command(*other)
        assert status == 1
        assert f"error: --output {undisturbed} was made from" in said
        assert said.endswith("allowed is the same again, or another folder\n")
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tokenize", "--source", "/nowhere"), "data.source = '/nowhere': allowed is one of sotu"),
        (
            ("tokenize", "--source", "sotu", "--tokenizer", "/nowhere"),
            "data.tokenizer = '/nowhere'",
        ),
        (("tokenize", "--source", "sotu", "--label-column", "mood"), "data.label-column = 'mood'"),
        (("tokenizer", "--source", "sotu", "--vocabulary", 9), "vocabulary = 9: allowed is"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, tmp_path):
    status, said = command(*arguments, "--output", tmp_path / "output")
    assert status == 1
    assert said.splitlines()[-1].startswith(f"error: {message}")
    assert not (tmp_path / "output").exists()


def test_an_output_that_cannot_be_made_is_said_in_one_line(source, tmp_path):
    (tmp_path / "file").touch()
    status, said = command(*asked_for(source, "bytes", tmp_path / "file" / "tokens"))
    assert status == 1
    assert said.count("\n") == 1
    assert str(tmp_path / "file") in said


def test_a_tokenizer_is_not_put_where_something_is(source, tmp_path):
    (tmp_path / "notes.txt").touch()
    arguments = ("--source", source, "--vocabulary", 300, "--output", tmp_path)
    status, said = command("tokenizer", *arguments)
    assert status == 1
    assert f"--output {tmp_path}: allowed is a folder that is new or empty" in said


def test_a_tokenizer_learns_from_no_held_out_text_and_from_parts_all_over(source):
    opened = open_source(str(source), text_column="body")
    texts = list(training_texts(opened))
    assert texts == [one.text for one in read_all(opened) if not is_held_out(one.name)]
    few = list(training_texts(opened, characters=2 * PAIRS * 100))
    assert len(few) >= 2 * PAIRS
    assert sum(map(len, few)) == 2 * PAIRS * 100
