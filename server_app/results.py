"""What a run leaves in its output folder."""

import json
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from logging import WARNING
from pathlib import Path
from typing import Any, Protocol

import matplotlib

matplotlib.use("Agg")

from flwr.supercore import log
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator
from transformers import PreTrainedModel

import isoloco_flwr
from isoloco_flwr.checkpoint import ChangedSettingsError, check_same_settings
from isoloco_flwr.fields import SettingsError

__all__ = ["draw_loss", "open_output_folder", "open_run", "save_model", "versions"]


_NOT_DECIDING = ("output-dir", "resume", "round-timeout", "strategy.diagnostics")
_NOT_DECIDING_GROUPS = ("checkpoint.", "metrics.")


class SavedTokenizer(Protocol):
    """What `save_model` needs of a tokenizer."""

    def save_pretrained(self, save_directory: Path) -> object:
        """Write its files into a folder."""


RUN_ID = "{run-id}"
"""Stands for Flower's number of the run in `output-dir`."""


def open_output_folder(output_dir: str, run_id: int, *, resume: bool) -> Path:
    """Make the run's folder and return its absolute path.

    `{run-id}` in the setting stands for Flower's number of the run. A relative folder lies in the
    directory that the ServerApp runs in.

    Raises
    ------
    SettingsError
        If the folder cannot be made, or holds a run already that is not to be resumed: nothing is
        overwritten.
    """
    key = f"run-config key output-dir = {output_dir!r}"
    if resume and RUN_ID in output_dir:
        raise SettingsError(f"{key}: to resume, allowed is the folder of the run that was cut")
    folder = Path(output_dir.replace(RUN_ID, str(run_id))).expanduser().absolute()
    if not resume and (folder / "config.json").exists():
        raise SettingsError(
            f"{key}: {folder} holds a run already, allowed is resume=true or another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{key}: allowed is a folder that can be made and written to ({error})"
        ) from error
    return folder


def open_run(folder: Path, config: dict[str, Any], *, allow_changed: bool) -> str:
    """Write what decides a run, or check that a resumed run is decided by the same.

    Parameters
    ----------
    folder : Path
        The run's folder.
    config : dict[str, Any]
        What goes into config.json, besides the run's key.
    allow_changed : bool
        Whether a resumed run may differ in what changes its numbers.

    Returns
    -------
    str
        The run's key, under which the workers keep their state; a resumed run has the old one.

    Raises
    ------
    ChangedSettingsError
        If something that changes the numbers has changed, and that is not allowed.
    """
    path = folder / "config.json"
    if path.exists():
        saved = json.loads(path.read_text())
        try:
            check_same_settings(_deciding(saved), _deciding(config))
        except ChangedSettingsError as changed:
            if not allow_changed:
                raise ChangedSettingsError(
                    f"{changed}; checkpoint.allow-changed-settings=true resumes all the same"
                ) from changed
            log(WARNING, "Resuming all the same: %s", changed)
        key = str(saved["run-key"])
    else:
        key = secrets.token_hex(8)
    write_json(path, {"run-key": key, **config})
    return key


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changes a run's numbers, flat."""
    deciding = {key: config[key] for key in ("num-workers", "num-parameters")}
    deciding["data"] = {side: config["data"][side]["sha256"] for side in ("train", "held-out")}
    for key, value in config["run-config"].items():
        if key not in _NOT_DECIDING and not key.startswith(_NOT_DECIDING_GROUPS):
            deciding[key] = value
    return deciding


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


def save_model(model: PreTrainedModel, tokenizer: SavedTokenizer, folder: Path) -> None:
    """Save model and tokenizer for `from_pretrained`, the folder whole or not at all."""
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.part-"))
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.chmod(0o755)
    if folder.exists():  # a finished run was resumed
        shutil.rmtree(folder)
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
