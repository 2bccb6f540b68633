"""The inner optimizer's state of one worker, kept in files from round to round."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "WorkerStateError",
    "age_state",
    "load_worker_state",
    "newest_state",
    "save_worker_state",
    "state_bytes",
]

FORMAT = "isoloco_flwr worker state 2"


class WorkerStateError(ValueError):
    """A state file that is cut, edited, or of another optimizer; the message names it."""


def state_bytes(optimizer: Optimizer, *, rounds: int) -> int:
    """Return how many bytes on the disk a worker's states take.

    Parameters
    ----------
    optimizer : Optimizer
        A fresh inner optimizer; SGD without momentum has no state, the others' are taken to have
        two moments a parameter in the parameter's dtype (Muon has one for the hidden matrices).
    rounds : int
        Rounds whose states are there at a time.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return 0
    sizes: list[int] = [
        parameter.nbytes for group in optimizer.param_groups for parameter in group["params"]
    ]
    return 2 * rounds * sum(sizes)


def save_worker_state(
    folder: Path, optimizer: Optimizer, *, round_number: int, keep_from: int | None = None
) -> None:
    """Write the state of an optimizer after a round, whole or not at all.

    Parameters
    ----------
    folder : Path
        The worker's own folder; made if missing.
    optimizer : Optimizer
        What is saved: all its tensors, by parameter and name.
    round_number : int
        The round that is done.
    keep_from : int, optional
        Oldest round whose state stays, for a run that goes back to it; None keeps the round before
        this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".part-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    tensors = {
        f"{index}.{name}": value
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    metadata = {
        "format": FORMAT,
        "round": str(round_number),
        "optimizer": type(optimizer).__name__,
        "sha256": _digest(tensors),
    }
    # A folder, since save_file, which writes straight from the tensors' memory, makes a temporary
    # file of its own. It goes whatever happens: a full disk must not be filled by every round.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
        whole = Path(part) / "state"
        save_file(tensors, whole, metadata=metadata)
        with whole.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(whole, _path(folder, round_number))
    oldest = round_number - 1 if keep_from is None else min(keep_from, round_number - 1)
    for path in folder.glob("round-*.safetensors"):
        number = int(path.stem.removeprefix("round-"))
        if number < oldest or number > round_number:
            path.unlink(missing_ok=True)


def load_worker_state(folder: Path, optimizer: Optimizer, *, round_number: int) -> bool:
    """Give an optimizer the state it had after a round.

    Parameters
    ----------
    folder : Path
        The worker's own folder.
    optimizer : Optimizer
        A fresh optimizer over the same parameters.
    round_number : int
        The round that was done; after round 0 there is no state.

    Returns
    -------
    bool
        False if there is no state of that round; the optimizer is as it was.

    Raises
    ------
    WorkerStateError
        If the file is cut, edited or another optimizer's.
    """
    path = _path(folder, round_number)
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WorkerStateError(f"{path} was cut or edited: {error}") from error
    if metadata.get("format") != FORMAT or metadata.get("round") != str(round_number):
        raise WorkerStateError(f"{path} is not {FORMAT!r} of round {round_number}")
    if metadata.get("sha256") != _digest(tensors):
        raise WorkerStateError(f"{path} was edited")
    if metadata.get("optimizer") != type(optimizer).__name__:
        raise WorkerStateError(
            f"{path} is the state of {metadata.get('optimizer')}, not of {type(optimizer).__name__}"
        )
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state.items():
        if index >= len(parameters) or any(
            value.ndim and value.shape != parameters[index].shape for value in values.values()
        ):
            raise WorkerStateError(f"{path} is the state of another model")
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return True


def newest_state(folder: Path, *, up_to: int) -> int:
    """Return the newest round, `up_to` or an earlier one, after which a state was saved; else 0.

    A later one was saved by a run that has gone back to an older checkpoint since.
    """
    rounds = (int(path.stem.removeprefix("round-")) for path in folder.glob("round-*.safetensors"))
    return max((number for number in rounds if number <= up_to), default=0)


def age_state(optimizer: Optimizer, steps: int) -> None:
    """Let the moments of an optimizer decay as in so many steps without a gradient.

    After `steps` steps with gradients of zero and a learning rate of zero the state is the same:
    AdamW's moments decay by the powers of their betas and its count of steps, which corrects
    their bias, goes on; Muon's momentum decays by the powers of its own. For a worker that was
    absent, this lets new gradients outweigh those that were taken far from here, the sooner the
    longer it was away, and its first updates are smaller than those of a fresh AdamW.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "exp_avg" in state:
                for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
                    state[name].mul_(beta**steps)
                state["step"] += steps
            elif "momentum_buffer" in state:
                state["momentum_buffer"].mul_(group["momentum"] ** steps)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _path(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:06d}.safetensors"
