"""Checkpoints of the outer loop: written whole or not at all, checked before they are believed.

A checkpoint is a folder `round-000012` with `parameters.safetensors`, `momentum.safetensors` and
`checkpoint.json`, which holds the round, the settings and the SHA-256 of the other two.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.supercore import log
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = [
    "ChangedSettingsError",
    "Checkpoint",
    "CheckpointError",
    "check_same_settings",
    "load_checkpoint",
    "newest_checkpoint",
    "save_checkpoint",
]

FORMAT = "isoloco_flwr checkpoint 1"
"""First entry of every checkpoint.json; a reader refuses any other."""

_TENSOR_FILES = ("parameters.safetensors", "momentum.safetensors")


class CheckpointError(ValueError):
    """A checkpoint that is cut, edited or not one at all; the message names it."""


class ChangedSettingsError(ValueError):
    """A resumed run with other settings than the one that wrote the checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """The outer loop after a round."""

    server_round: int
    """Rounds that are done."""
    parameters: Mapping[str, Tensor]
    """Global parameters by name."""
    momentum: Mapping[str, Tensor]
    """Momentum of the outer optimizer by name; empty without momentum or before the first step."""
    settings: Mapping[str, Any]
    """Settings of the strategy, as JSON has them."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int = 2) -> Path:
    """Write a checkpoint and remove the oldest ones.

    Parameters
    ----------
    folder : Path
        Where the run's checkpoints lie; made if missing.
    checkpoint : Checkpoint
        What is written.
    keep : int
        Newest checkpoints that stay, >= 1.

    Returns
    -------
    Path
        The checkpoint's folder.

    Notes
    -----
    Everything is written into a folder aside, forced to the disk, and renamed: at no moment is
    there a checkpoint with a part missing under the final name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder, prefix=".part-"))
    try:
        checksums = {}
        for name, tensors in zip(
            _TENSOR_FILES, (checkpoint.parameters, checkpoint.momentum), strict=True
        ):
            contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(contiguous, part / name)
            checksums[name] = _force_and_sum(part / name)
        content = {
            "format": FORMAT,
            "round": checkpoint.server_round,
            "names": list(checkpoint.parameters),
            "settings": dict(checkpoint.settings),
            "sha256": checksums,
        }
        path = part / "checkpoint.json"
        path.write_text(json.dumps({**content, "sha256-of-this": _digest(content)}, indent=2))
        _force_and_sum(path)
        _force_folder(part)
        final = folder / f"round-{checkpoint.server_round:06d}"
        if final.exists():  # the round was run again after a resume
            shutil.rmtree(final)
        part.chmod(0o755)
        os.replace(part, final)
        _force_folder(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for old in _folders(folder)[keep:]:
        shutil.rmtree(old)
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it.

    Parameters
    ----------
    path : Path
        A checkpoint's folder.

    Raises
    ------
    CheckpointError
        If a file is missing, cut, edited or of another format; the message names it.
    """
    try:
        content = json.loads((path / "checkpoint.json").read_text())
        stored = content.pop("sha256-of-this")
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} is of format {content['format']!r}, allowed is {FORMAT!r}"
            )
        if stored != _digest(content):
            raise CheckpointError(f"{path / 'checkpoint.json'} was edited or cut")
        tensors = []
        for name in _TENSOR_FILES:
            if _checksum(path / name) != content["sha256"][name]:
                raise CheckpointError(f"{path / name} was edited or cut")
            tensors.append(load_file(path / name))
    except (OSError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path / 'checkpoint.json'} was edited or cut") from error
    return Checkpoint(
        server_round=content["round"],
        parameters={name: tensors[0][name] for name in content["names"]},
        momentum=tensors[1],
        settings=content["settings"],
    )


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest good checkpoint of a run, None if there is none.

    A bad one is named in the log and passed over; what a save left half-written is removed.
    """
    for part in folder.glob(".part-*"):
        shutil.rmtree(part, ignore_errors=True)
    for path in _folders(folder):
        try:
            checkpoint = load_checkpoint(path)
        except CheckpointError as error:
            log(WARNING, "A checkpoint is passed over: %s", error)
        else:
            log(INFO, "Resuming after round %d, from %s", checkpoint.server_round, path)
            return checkpoint
    return None


def check_same_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise `ChangedSettingsError` unless two sets of settings agree.

    The message names every key that differs, with both values.
    """
    current = json.loads(json.dumps(dict(current)))
    changed = [
        f"{key} was {saved.get(key, 'not there')!r}, is {current.get(key, 'not there')!r}"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key, ...) != current.get(key, ...)
    ]
    if changed:
        raise ChangedSettingsError(f"the run to resume had other settings: {'; '.join(changed)}")


def _folders(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest first."""
    return sorted(folder.glob("round-*"), reverse=True)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _force_and_sum(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _force_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
