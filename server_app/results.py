"""What a run leaves in its output folder."""

import json
import os
import platform
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator
from transformers import PreTrainedModel

import isoloco_flwr
from isoloco_flwr.pretraining.tokenizer import byte_tokenizer
from isoloco_flwr.settings import SettingsError

__all__ = ["draw_loss", "open_output_folder", "save_model", "versions", "write_json"]


def open_output_folder(output_dir: str, run_id: int) -> Path:
    """Make the run's folder and return its absolute path.

    `{run-id}` in the setting stands for Flower's number of the run. A relative folder lies in the
    directory that the ServerApp runs in.

    Raises
    ------
    SettingsError
        If the folder cannot be made or holds a run already: nothing is overwritten.
    """
    folder = Path(output_dir.replace("{run-id}", str(run_id))).expanduser().absolute()
    if (folder / "metrics.jsonl").exists():
        raise SettingsError(
            f"run-config key output-dir = {output_dir!r}: {folder} holds a run already, "
            "allowed is a folder without metrics.jsonl"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"run-config key output-dir = {output_dir!r}: allowed is a folder that can be "
            f"made and written to ({error})"
        ) from error
    return folder


def versions() -> dict[str, str]:
    """Return the versions of everything that can change a result."""
    return {
        "python": platform.python_version(),
        "isoloco_flwr": isoloco_flwr.__version__,
        **{name: version(name) for name in ("flwr", "torch", "transformers", "numpy")},
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".part") as file:
        json.dump(content, file, indent=2, sort_keys=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Save model and tokenizer for `from_pretrained`, the folder whole or not at all."""
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.part-"))
    model.save_pretrained(part)
    byte_tokenizer().save_pretrained(part)
    part.chmod(0o755)
    os.replace(part, folder)


def draw_loss(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw held-out and training loss over the tokens seen.

    Parameters
    ----------
    rows : list[dict[str, Any]]
        Lines of `metrics.jsonl`.
    title : str
        Title of the picture.
    path : Path
        Where the PNG goes.
    """
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for key, label, style in (
        ("eval-loss", "held-out", "o-"),
        ("train-loss", "training, mean over the round", ".--"),
    ):
        points = [(row["tokens"] / 1e6, row[key]) for row in rows if row[key] is not None]
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set(title=title, xlabel="tokens seen by all workers, millions", ylabel="nats per token")
    axes.yaxis.set_major_locator(MaxNLocator(8))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
