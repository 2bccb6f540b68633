"""The merges by name, with their options: one table for every caller."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Generator, Tensor

from isoloco_flwr import polar
from isoloco_flwr.merging.dare import dare
from isoloco_flwr.merging.iso_c import iso_c, iso_c_of_mean
from isoloco_flwr.merging.iso_cts import iso_cts
from isoloco_flwr.merging.mean import mean
from isoloco_flwr.merging.ties import ties
from isoloco_flwr.merging.tsv import tsv

__all__ = ["METHODS", "MergeMethod", "MergeOption", "check_options", "merge"]


@dataclass(frozen=True)
class MergeOption:
    """One option of a merge."""

    default: object
    """Value taken when the option is not given."""
    allowed: str
    """What is allowed, in words for the documentation and the error."""
    accepts: Callable[[object], bool]
    """Whether a value is allowed."""
    in_config: bool = True
    """Whether a configuration file can hold it."""


@dataclass(frozen=True)
class MergeMethod:
    """One merge: what it is called, what it takes, what it needs."""

    name: str
    """Key in `METHODS`."""
    function: Callable[..., Tensor]
    """(deltas of shape (R, *shape), **options) -> merged of shape (*shape)."""
    from_mean: Callable[..., Tensor] | None
    """(mean of shape (*shape), **options) -> merged, for a merge that needs the mean alone."""
    matrices_only: bool
    """Whether a parameter that is not 2-D is averaged."""
    options: Mapping[str, MergeOption]
    """Options by name."""
    summary: str
    """What it does, in one line."""
    paper: str
    """Where it was published."""


def _one_of(default: str, allowed: Iterable[str]) -> MergeOption:
    names = tuple(allowed)
    return MergeOption(default, f"one of {', '.join(names)}", lambda value: value in names)


def _number(value: object) -> float:
    """Return a number as a float, and anything else as one that no range holds."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else math.nan  # type: ignore[arg-type]


def _is_generators(value: object) -> bool:
    if isinstance(value, Sequence):
        return all(isinstance(one, Generator) for one in value)
    return value is None or isinstance(value, Generator)


METHODS: dict[str, MergeMethod] = {
    method.name: method
    for method in (
        MergeMethod(
            name="mean",
            function=mean,
            from_mean=lambda mean_delta: mean_delta,
            matrices_only=False,
            options={},
            summary="mean of the workers",
            paper="arXiv 2311.08105",
        ),
        MergeMethod(
            name="iso_c",
            function=iso_c,
            from_mean=iso_c_of_mean,
            matrices_only=True,
            options={
                "polar": _one_of("svd", polar.METHODS),
                "scale": _one_of("nuclear", polar.SCALES),
            },
            summary="mean with every singular value replaced by the mean one",
            paper="arXiv 2502.04959",
        ),
        MergeMethod(
            name="iso_cts",
            function=iso_cts,
            from_mean=None,
            matrices_only=True,
            options={
                "common_space_fraction": MergeOption(
                    0.8, "a number from 0 to 1", lambda value: 0 <= _number(value) <= 1
                ),
            },
            summary="common directions and every worker's own, all singular values equal",
            paper="arXiv 2502.04959",
        ),
        MergeMethod(
            name="tsv",
            function=tsv,
            from_mean=None,
            matrices_only=True,
            options={
                "singular_ratio": MergeOption(
                    None,
                    "a number above 0 and up to 1, or none for 1/R",
                    lambda value: value is None or 0 < _number(value) <= 1,
                ),
                "decorrelate": MergeOption(
                    True, "true or false", lambda value: isinstance(value, bool)
                ),
            },
            summary="sum of every worker's leading singular triples, decorrelated",
            paper="arXiv 2412.00081",
        ),
        MergeMethod(
            name="ties",
            function=ties,
            from_mean=None,
            matrices_only=False,
            options={
                "sparsity": MergeOption(
                    0.1, "a number from 0 to 1", lambda value: 0 <= _number(value) <= 1
                ),
            },
            summary="mean of the large entries that have the elected sign",
            paper="arXiv 2306.01708",
        ),
        MergeMethod(
            name="dare",
            function=dare,
            from_mean=None,
            matrices_only=False,
            options={
                "sparsity": MergeOption(
                    0.1,
                    "a number from 0 to below 1",
                    lambda value: 0 <= _number(value) < 1,
                ),
                "generator": MergeOption(
                    None,
                    "none, a torch.Generator, or a sequence of one for each worker",
                    _is_generators,
                    in_config=False,
                ),
            },
            summary="mean of randomly thinned and rescaled pseudo-gradients",
            paper="arXiv 2311.03099",
        ),
    )
}
"""Every merge by name."""


def check_options(method: str, options: Mapping[str, object]) -> dict[str, object]:
    """Check the options of a merge and fill in the defaults of those left out.

    Parameters
    ----------
    method : str
        Name of a merge.
    options : Mapping[str, object]
        Options by name.

    Returns
    -------
    dict[str, object]
        Every option of the merge.

    Raises
    ------
    ValueError
        If the merge or an option is unknown (what exists, and the nearest name, are in the
        message), or a value is not allowed.
    """
    if method not in METHODS:
        raise ValueError(f"merge {_unknown(method, METHODS)}")
    known = METHODS[method].options
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{method}: option {_unknown(name, known)}")
        if not known[name].accepts(value):
            raise ValueError(f"{method}: {name} = {value!r}, allowed is {known[name].allowed}")
    return {name: options.get(name, option.default) for name, option in known.items()}


def merge(method: str, deltas: Tensor, **options: object) -> Tensor:
    """Merge the pseudo-gradients of R workers for one parameter into one.

    Parameters
    ----------
    method : str
        Name of a merge in `METHODS`.
    deltas : Tensor
        Stack of shape (R, *shape), R >= 1, floating point; left as it is.
    **options : object
        Options of that merge.

    Returns
    -------
    Tensor
        Shape (*shape), the stack's dtype and device.

    Raises
    ------
    ValueError
        If the merge, an option or a value is not allowed, R = 0, the dtype is not floating point,
        or a value is not finite.
    """
    checked = check_options(method, options)
    return METHODS[method].function(deltas, **checked)


def _unknown(name: str, known: Iterable[str]) -> str:
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{name!r} is unknown, there are: {', '.join(names) or 'none'}{hint}"
