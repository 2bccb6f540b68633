"""Settings as frozen dataclasses, each field with the range of its values.

A flat config with kebab-case keys, groups separated by dots, becomes a dataclass of dataclasses:
`strategy.outer-lr` is the field `outer_lr` of the group `strategy`.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

__all__ = ["PRESET", "SettingsError", "build_settings", "setting", "setting_keys"]

_T = typing.TypeVar("_T")

PRESET = "preset"
"""The word in a run config that leaves a value to the strategy's preset."""


class SettingsError(ValueError):
    """A config with an unknown, missing, mistyped or out-of-range value."""


def setting(
    *,
    default: Any = dataclasses.MISSING,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    may_be_empty: bool = False,
) -> Any:
    """Make a dataclass field with the range that `build_settings` checks."""
    return dataclasses.field(
        default=default,
        metadata={
            "at_least": at_least,
            "above": above,
            "below": below,
            "choices": choices,
            "may_be_empty": may_be_empty,
        },
    )


def setting_keys(cls: type, prefix: str = "") -> list[str]:
    """Return all keys of a config that becomes `cls`."""
    keys: list[str] = []
    for _, name, hint in _fields(cls):
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            keys += setting_keys(hint, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def build_settings(cls: type[_T], config: Mapping[str, Any], what: str, prefix: str = "") -> _T:
    """Check a flat config and return it as a dataclass; keys it does not know are left alone.

    Parameters
    ----------
    cls : type
        The dataclass, its fields made with `setting`.
    config : Mapping[str, Any]
        Values by key.
    what : str
        What an error calls a key: "run-config key".
    prefix : str
        Group that `cls` is, with a dot at its end.

    Raises
    ------
    SettingsError
        One line that names the key, its value and what is allowed.
    """
    values: dict[str, Any] = {}
    for field, name, hint in _fields(cls):
        key = prefix + name
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            values[field.name] = build_settings(hint, config, what, f"{key}.")
        elif key in config:
            values[field.name] = _check(f"{what} {key}", config[key], hint, field.metadata)
        elif field.default is dataclasses.MISSING:
            raise SettingsError(
                f"{what} {key} is missing: it takes {_allowed(hint, field.metadata)}"
            )
    return cls(**values)


def _fields(cls: type) -> list[tuple[dataclasses.Field[Any], str, Any]]:
    hints = typing.get_type_hints(cls)
    return [
        (field, field.name.replace("_", "-"), hints[field.name])
        for field in dataclasses.fields(cls)
    ]


def _check(what: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
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
        if within and (kind is not str or value or limits["may_be_empty"]):
            return kind(value)
    raise SettingsError(f"{what} = {value!r}: allowed is {_allowed(hint, limits)}")


def _allowed(hint: Any, limits: Mapping[str, Any]) -> str:
    optional = isinstance(hint, types.UnionType)
    kind = typing.get_args(hint)[0] if optional else hint
    if limits["choices"] is not None:
        return "one of " + ", ".join(limits["choices"])
    text = {
        str: "a text" if limits["may_be_empty"] else "a text that is not empty",
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
