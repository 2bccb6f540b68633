"""A run config is taken whole or refused with one line."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict

from isoloco_flwr.settings import SettingsError, parse_settings

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
DEFAULTS = flatten_dict(tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"])


def test_the_defaults_in_pyproject_are_a_whole_config():
    settings = parse_settings(DEFAULTS)
    assert settings.strategy.name == "isoloco"
    assert settings.strategy.preset.outer_lr == 1.8
    assert settings.strategy.preset.outer_momentum == 0.8


def test_an_integer_stands_for_a_float():
    settings = parse_settings({**DEFAULTS, "strategy.outer-lr": 2, "inner.lr": 1})
    assert settings.strategy.preset.outer_lr == 2.0
    assert isinstance(settings.inner.lr, float)


def test_merge_options_replace_the_preset_s():
    text = "polar = 'fast', scale = 'rms'"
    settings = parse_settings({**DEFAULTS, "strategy.merge-options": text})
    assert settings.strategy.preset.merge_options == {"polar": "fast", "scale": "rms"}
    ties = {"strategy.name": "ties", "strategy.merge-options": "sparsity = 0.5"}
    assert parse_settings({**DEFAULTS, **ties}).strategy.preset.merge_options == {"sparsity": 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy.name": "ties", "strategy.orthogonalize": "update"},
        {"model.path": "/models/a", "model.config": "/models/b.json"},
    ],
)
def test_two_values_that_do_not_go_together_are_both_named(changes):
    with pytest.raises(SettingsError) as error:
        parse_settings({**DEFAULTS, **changes})
    for key, value in changes.items():
        assert f"{key} = {value!r}" in str(error.value)


def test_a_value_of_zero_momentum_is_not_mistaken_for_unset():
    settings = parse_settings({**DEFAULTS, "strategy.outer-momentum": 0})
    assert settings.strategy.preset.outer_momentum == 0.0


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("strategy.name", "isoloko", "one of local-sgd, diloco, iso-c, isoloco"),
        ("strategy.outer-lr", 0, '> 0, or "preset"'),
        ("strategy.outer-lr", float("inf"), "> 0"),
        ("strategy.outer-lr", float("nan"), "> 0"),
        ("strategy.outer-lr", "1.8", "a number > 0"),
        ("strategy.outer-momentum", 1.0, ">= 0 and < 1"),
        ("strategy.outer-momentum", -0.1, ">= 0 and < 1"),
        ("inner.steps", 0, "a whole number >= 1"),
        ("inner.steps", 30.0, "a whole number >= 1"),
        ("inner.steps", True, "a whole number >= 1"),
        ("inner.lr", "fast", "a number > 0"),
        ("inner.optimizer", "adam", "one of adamw, muon, sgd"),
        ("global-batch-size", -1, "a whole number >= 1"),
        ("seed", 2**31, f">= 0 and < {2**31}"),
        ("output-dir", "", "a text that is not empty"),
        ("data.source", 3, "a text"),
        ("strategy.orthogonalize", "momentum", "one of gradient, update"),
        ("strategy.merge-options", "polar 'fast'", "name = value, separated by commas"),
        ("strategy.merge-options", "polar = 'slow'", "iso_c: polar = 'slow', allowed is one of"),
        ("strategy.merge-options", "sparsity = 0.1", "iso_c: option 'sparsity'"),
        ("inner.reply", "deltas", "one of parameters, pseudo-gradient-fp32"),
        ("inner.warmup-fraction", 1.0, ">= 0 and < 1"),
        ("data.partitioner", "label", "data.label-column"),
        ("resume", 1, "true or false"),
        ("resume", "yes", "true or false"),
        ("checkpoint.every", 0, "a whole number >= 1"),
        ("min-sites", -1, "a whole number >= 0"),
        ("round-timeout", 0, "a number > 0"),
        ("strategy.weighting", "steps", "one of uniform, examples"),
        ("inner.stale-state", "keep", "one of age, use, reset"),
        ("metrics.port", 65536, ">= 0 and < 65536"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(key, value, allowed):
    with pytest.raises(SettingsError) as error:
        parse_settings({**DEFAULTS, key: value})
    message = str(error.value)
    assert key in message
    assert repr(value) in message
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("inner.step", "inner.steps"),
        ("strategy.outer_lr", "strategy.outer-lr"),
        ("num-rounds", "num-server-rounds"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one(typo, meant):
    with pytest.raises(SettingsError, match=f"{typo} = 7: did you mean {meant}"):
        parse_settings({**DEFAULTS, typo: 7})


def test_a_missing_key_is_named():
    with pytest.raises(SettingsError, match="seed is missing"):
        parse_settings({key: value for key, value in DEFAULTS.items() if key != "seed"})


@pytest.mark.parametrize(("workers", "share"), [(1, 32), (8, 4), (32, 1)])
def test_the_global_batch_is_shared_out(workers, share):
    assert parse_settings(DEFAULTS).worker_batch_size(workers) == share


@pytest.mark.parametrize("workers", [3, 64])
def test_a_global_batch_that_does_not_divide_is_refused(workers):
    with pytest.raises(SettingsError, match=f"global-batch-size = 32.*multiple of {workers}"):
        parse_settings(DEFAULTS).worker_batch_size(workers)


def test_every_setting_says_what_it_is():
    source = (PYPROJECT.parent / "isoloco_flwr" / "settings.py").read_text()
    settings = parse_settings(DEFAULTS)
    groups = [settings, *(value for value in vars(settings).values() if hasattr(value, "__dict__"))]
    for group in groups:
        for field in dataclasses.fields(group):
            line = source.index(f"    {field.name}: ")
            assert source[line:].split("\n")[1].strip().startswith('"""'), field.name
