"""Experiments as data: a TOML file in, a list of FLOP-matched runs out.

An experiment has a run config that all its runs share, and axes that are crossed with one another.
A value of an axis is either a plain one, as of the run-config key `seed`, or an option: a name for
several settings, as the method `diloco`. Every run trains on the same tokens with the same global
batch: the worker batch is global / R, and the number of rounds follows from the budget.
"""

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from flwr.common.config import flatten_dict

from isoloco_flwr.pretraining.model import DEFAULT_CONTEXT, MODEL_PRESETS
from isoloco_flwr.settings import SettingsError, parse_settings

__all__ = [
    "EXPERIMENTS",
    "ROOT",
    "Experiment",
    "ExperimentError",
    "Option",
    "Report",
    "Run",
    "Scale",
    "app_config",
    "experiment_names",
    "final_runs",
    "load_experiment",
    "rounds_of_budget",
    "tuning_runs",
    "worker_batch_size",
]

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = Path(__file__).with_name("experiments")

Value = bool | float | int | str

WORKERS = "workers"
"""Setting of an experiment that is not a run-config key: R."""
DATA_PARALLEL = "data-parallel"
"""The other one: train in one process, with an optimizer step on every global batch."""
_DERIVED = ("num-server-rounds", "output-dir", "resume")


class ExperimentError(ValueError):
    """An experiment with an unknown, missing or impossible value; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One value of an axis."""

    name: str
    """How it is called in run ids and pictures."""
    settings: Mapping[str, Value]
    """Run-config keys, `workers` and `data-parallel` that it sets."""
    grid: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Run-config keys that are tuned for it, with the values that are tried."""
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of other axes' options that it goes together with; an axis not named goes in full."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the pictures show."""

    x: str
    """Axis along which the final loss is drawn."""
    lines: str
    """Axis that gives the lines of a picture."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An experiment at a certain size."""

    budget_tokens: int
    """Tokens that every run trains on, over all workers."""
    config: Mapping[str, Value]
    """Run-config keys that all runs share."""
    axes: Mapping[str, tuple[Option, ...]]
    """What is varied; all combinations are run."""
    tune: Mapping[str, str] | None
    """Options at which the grids are tried; an axis not named is tuned at each of its values."""
    jobs: int = 1
    """Runs at a time."""
    cpus_per_client: int = 1
    """CPUs a virtual client takes up: a run has as many clients at a time as the machine has.

    Where `jobs` leave one run for the end, its clients take up so many times fewer."""
    gpus_per_client: float = 0.0
    """GPUs, or a share of one, that a virtual client takes up."""
    threads: int = 1
    """Threads of a client's arithmetic."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question and the runs that answer it."""

    name: str
    """Name of its file."""
    title: str
    """Heading of its report."""
    question: str
    """What is asked, in a sentence or two."""
    report: Report
    """What the pictures show."""
    scales: Mapping[str, Scale]
    """By name."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of an experiment."""

    name: str
    """The run's id: its values along all axes."""
    point: Mapping[str, str]
    """By axis, the name of the option."""
    grid: Mapping[str, Value]
    """Values of the tuned keys."""
    workers: int
    """R."""
    data_parallel: bool
    """Whether it is the data-parallel baseline."""
    config: Mapping[str, Value]
    """Run-config keys that the experiment sets or derives; the rest is the app's own."""

    @property
    def rounds(self) -> int:
        """Outer rounds; of a data-parallel run, evaluations."""
        return cast(int, self.config["num-server-rounds"])


def experiment_names() -> list[str]:
    """Return the names of the experiments that come with the project."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))


def load_experiment(name: str) -> Experiment:
    """Read an experiment.

    Parameters
    ----------
    name : str
        Name of one that comes with the project, or path of a TOML file.

    Raises
    ------
    ExperimentError
        If there is none, or it has an unknown, missing or mistyped key.
    """
    path = Path(name) if name.endswith(".toml") else EXPERIMENTS / f"{name}.toml"
    if not path.is_file():
        raise ExperimentError(
            f"experiment {name!r}: allowed is one of {', '.join(experiment_names())}, or the path "
            "of a .toml file"
        )
    try:
        content = tomllib.loads(path.read_text())
        content = {"config": {}, "axes": {}, **content}
        shared = {key: content.pop(key) for key in ("config", "axes")}
        scales = {
            scale: _scale(_merged(shared, own), f"{path.name}: scales.{scale}")
            for scale, own in _take(content, "scales", dict).items()
        }
        report = _build(Report, _take(content, "report", dict), f"{path.name}: report")
        named = {"name": path.stem, "report": report, "scales": scales, **content}
        experiment: Experiment = _build(Experiment, named, path.name)
        return experiment
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{path}: {error}") from error


def tuning_runs(scale: Scale) -> list[Run]:
    """Return the runs that tune the grids; empty if nothing is tuned."""
    if scale.tune is None:
        return []
    runs = {}
    for options in _points(scale):
        if all(_is_tuned_at(options, axis, scale) for axis in scale.axes):
            for grid in _grid_points(options):
                run = _run(scale, options, grid)
                runs[run.name] = run
    return [run for run in runs.values() if run.grid]


def final_runs(scale: Scale, losses: Mapping[str, float]) -> tuple[list[Run], list[str]]:
    """Return the runs that answer the question, with the tuned values that did best.

    Parameters
    ----------
    scale : Scale
        An experiment's scale.
    losses : Mapping[str, float]
        Final held-out loss of the tuning runs that are finished, by name.

    Returns
    -------
    runs : list[Run]
        In the order of the axes. A point whose tuning is not finished has none.
    untuned : list[str]
        Names of the tuning runs that the missing points wait for.
    """
    tuned: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in tuning_runs(scale):
        tuned.setdefault(_tuned_for(scale, run.point), []).append(run)
    runs = []
    untuned: dict[str, None] = {}
    for options in _points(scale):
        grid: Mapping[str, Value] = {}
        if any(option.grid for option in options.values()):
            point = {axis: option.name for axis, option in options.items()}
            tried = tuned[_tuned_for(scale, point)]
            missing = [run.name for run in tried if run.name not in losses]
            if missing:
                untuned.update(dict.fromkeys(missing))
                continue
            grid = min(tried, key=lambda run: _comparable(losses[run.name])).grid
        runs.append(_run(scale, options, grid))
    return runs, list(untuned)


def rounds_of_budget(
    budget_tokens: int, *, steps: int, global_batch_size: int, context: int
) -> int:
    """Return how many rounds of H inner steps spend a budget of tokens.

    Raises
    ------
    ExperimentError
        If they do not divide it; the message names the nearest budget that they divide.
    """
    tokens = steps * global_batch_size * context
    rounds, left = divmod(budget_tokens, tokens)
    if left or rounds < 1:
        nearest = max(1, rounds + (2 * left > tokens)) * tokens
        raise ExperimentError(
            f"budget-tokens = {budget_tokens}: rounds of {steps} inner steps x "
            f"{global_batch_size} sequences x {context} tokens = {tokens} tokens do not divide it, "
            f"the nearest that they divide is {nearest}"
        )
    return rounds


def worker_batch_size(global_batch_size: int, workers: int) -> int:
    """Return the sequences of one worker's inner step.

    Raises
    ------
    ExperimentError
        If the global batch cannot be shared out equally; the message names the nearest number of
        workers that can share it.
    """
    if workers < 1 or global_batch_size % workers:
        divisors = [n for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - workers))
        raise ExperimentError(
            f"workers = {workers}: a global batch of {global_batch_size} sequences cannot be "
            f"shared out equally among them, the nearest number that can is {nearest}"
        )
    return global_batch_size // workers


@lru_cache(maxsize=1)
def app_config() -> dict[str, Value]:
    """Return the app's own run config, from pyproject.toml."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    config: dict[str, Value] = flatten_dict(content["tool"]["flwr"]["app"]["config"])
    return config


def _scale(content: dict[str, Any], where: str) -> Scale:
    axes = {
        axis: tuple(
            Option(name=_text(value), settings={axis: value})
            if isinstance(values, list)
            else _option(value, {"grid": {}, "only": {}, **values[value]}, f"{where}.axes.{axis}")
            for value in values
        )
        for axis, values in content.pop("axes").items()
    }
    tune = content.pop("tune", None)
    if tune is not None:
        tune = {axis: _text(value) for axis, value in tune.items()}
    scale: Scale = _build(Scale, {"axes": axes, "tune": tune, **content}, where)
    _check_axes(scale, where)
    try:
        for options in _points(scale):
            for grid in _grid_points(options):
                _run(scale, options, grid)
    except (ExperimentError, SettingsError) as error:
        raise ExperimentError(f"{where}: {error}") from error
    return scale


def _option(name: str, content: dict[str, Any], where: str) -> Option:
    grid = {key: tuple(values) for key, values in content.pop("grid").items()}
    only = {axis: tuple(map(_text, names)) for axis, names in content.pop("only").items()}
    if not all(grid.values()):
        raise ExperimentError(f"{where}.{name}.grid: allowed are lists that are not empty")
    return Option(name=name, settings=content, grid=grid, only=only)


def _check_axes(scale: Scale, where: str) -> None:
    names = {axis: [option.name for option in options] for axis, options in scale.axes.items()}
    restrictions = [
        (f"{where}.axes.{axis}.{option.name}.only", option.only)
        for axis, options in scale.axes.items()
        for option in options
    ] + [(f"{where}.tune", {axis: (name,) for axis, name in (scale.tune or {}).items()})]
    for place, restriction in restrictions:
        for axis, wanted in restriction.items():
            if axis not in names:
                raise ExperimentError(f"{place}: axis {axis!r}, allowed is one of {list(names)}")
            for name in wanted:
                if name not in names[axis]:
                    raise ExperimentError(
                        f"{place}: {axis} = {name}, allowed is one of {', '.join(names[axis])}"
                    )
    if scale.tune is None and any(
        option.grid for options in scale.axes.values() for option in options
    ):
        raise ExperimentError(
            f"{where}: there are grids, but no tune: allowed is a table of the values at which "
            "they are tried, as tune = {seed = 0}"
        )


def _points(scale: Scale) -> Iterator[dict[str, Option]]:
    """Yield all combinations of options that go together."""
    for options in itertools.product(*scale.axes.values()):
        point = dict(zip(scale.axes, options, strict=True))
        if all(
            point[axis].name in names for option in options for axis, names in option.only.items()
        ):
            yield point


def _is_tuned_at(options: Mapping[str, Option], axis: str, scale: Scale) -> bool:
    """Tell whether a point's value along an axis is the one to tune at.

    An option that does not go together with that value is tuned at each it goes together with.
    """
    assert scale.tune is not None
    if axis not in scale.tune:
        return True
    elsewhere = any(
        axis in option.only and scale.tune[axis] not in option.only[axis]
        for option in options.values()
    )
    return elsewhere or options[axis].name == scale.tune[axis]


def _tuned_for(scale: Scale, point: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the part of a point that shares its tuned values."""
    assert scale.tune is not None
    return tuple((axis, name) for axis, name in point.items() if axis not in scale.tune)


def _grid_points(options: Mapping[str, Option]) -> Iterator[dict[str, Value]]:
    grid = {key: values for option in options.values() for key, values in option.grid.items()}
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _run(scale: Scale, options: Mapping[str, Option], grid: Mapping[str, Value]) -> Run:
    settings = dict(scale.config)
    for option in options.values():
        settings |= option.settings
    settings |= grid
    point = {axis: option.name for axis, option in options.items()}
    values = point | {key: _text(value) for key, value in grid.items()}
    named_by_key = {axis for axis, option in options.items() if axis in option.settings} | set(grid)
    name = "_".join(
        _file_part(f"{key}-{value}" if key in named_by_key else value)
        for key, value in values.items()
    )
    return Run(name=name, point=point, grid=grid, **_resolve(scale, settings))


def _resolve(scale: Scale, settings: dict[str, Value]) -> dict[str, Any]:
    """Take the experiment's own settings out, derive the rounds and check the run config."""
    workers = settings.pop(WORKERS, 1)
    data_parallel = settings.pop(DATA_PARALLEL, False)
    for key in _DERIVED:
        if key in settings:
            raise ExperimentError(f"{key} = {settings[key]!r}: follows from the experiment")
    if not isinstance(workers, int) or not isinstance(data_parallel, bool):
        raise ExperimentError(
            f"workers = {workers!r}, data-parallel = {data_parallel!r}: allowed are a whole number "
            "and true or false"
        )
    if data_parallel and workers != 1:
        raise ExperimentError(f"workers = {workers}: a data-parallel run has 1")
    config = app_config() | settings
    checked = parse_settings(config | {"num-server-rounds": 1})
    worker_batch_size(checked.global_batch_size, workers)
    rounds = rounds_of_budget(
        scale.budget_tokens,
        steps=checked.inner.steps,
        global_batch_size=checked.global_batch_size,
        context=_context(checked.model.preset, checked.model.context),
    )
    return {
        "workers": workers,
        "data_parallel": data_parallel,
        "config": {"num-server-rounds": rounds, **settings},
    }


def _context(preset: str, limit: int) -> int:
    if preset not in MODEL_PRESETS:
        raise ExperimentError(
            f"model.preset = {preset!r}: allowed is one of {', '.join(MODEL_PRESETS)}"
        )
    return min(MODEL_PRESETS[preset].context, limit or DEFAULT_CONTEXT)


def _comparable(loss: float) -> float:
    """Return a loss that sorts last where it is not a number."""
    return loss if loss == loss else float("inf")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _file_part(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text)


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables with the own values in place of shared ones."""
    result = dict(shared)
    for key, value in own.items():
        both_tables = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both_tables else value
    return result


def _take(content: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(content.get(key), kind):
        raise ExperimentError(f"key {key} = {content.get(key)!r}: allowed is a table")
    return content.pop(key)


def _build(cls: type, content: Mapping[str, Any], where: str) -> Any:
    values = {key.replace("-", "_"): value for key, value in content.items()}
    fields = {own.name: own for own in dataclasses.fields(cls)}
    for name, value in values.items():
        if name not in fields:
            keys = ", ".join(own.replace("_", "-") for own in fields)
            raise ExperimentError(f"{where}: unknown key {name.replace('_', '-')}, known: {keys}")
        kind = fields[name].type
        right = {int: (int,), float: (int, float), str: (str,)}.get(cast(type, kind), (object,))
        if not isinstance(value, right) or (kind in (int, float) and value is True):
            raise ExperimentError(f"{where}.{name.replace('_', '-')} = {value!r}: wrong type")
    for name, own in fields.items():
        if name not in values and own.default is dataclasses.MISSING:
            raise ExperimentError(f"{where}: key {name.replace('_', '-')} is missing")
    return cls(**values)
