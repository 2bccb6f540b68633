"""Where the runs have ended: final losses, and by how much they are above the baseline."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from simulations.outcome import Outcome
from simulations.report.page import Section
from simulations.report.pictures import baseline_style, draw_picture, line_style
from simulations.report.view import View, is_number

__all__ = ["Spread", "degradation", "degradation_section", "loss_section", "spread"]


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    mean: float
    """Mean over the seeds."""
    deviation: float
    """Sample standard deviation; 0 with one seed."""
    count: int
    """Seeds."""


def spread(values: Sequence[float]) -> Spread:
    """Return mean and sample standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(statistics.fmean(values), deviation, len(values))


def degradation(loss: float, baseline: float) -> float:
    """Return by how many per cent a loss is above that of data-parallel training."""
    return 100 * (loss / baseline - 1)


def loss_section(view: View) -> Section:
    """Return the final losses, those of data-parallel training first."""
    groups, baseline_groups = view.groups(), view.baseline_groups()
    spreads = {key: spread([run.loss for run in group]) for key, group in groups.items()}
    baselines = {
        name: spread([run.loss for run in group]) for name, group in baseline_groups.items()
    }

    def draw(axes: Axes) -> None:
        _draw_spreads(view, axes, spreads)
        for number, (name, value) in enumerate(baselines.items()):
            axes.axhline(value.mean, **baseline_style(number, name))
            if value.deviation:
                low, high = value.mean - value.deviation, value.mean + value.deviation
                axes.axhspan(low, high, color="0.35", alpha=0.12, linewidth=0)
        axes.set_ylabel("held-out loss, nats a token")

    rows = [
        {**view.columns(group), **_spread_columns(value, "loss", 4), "tuned": _tuned(group)}
        for group, value in [
            *zip(baseline_groups.values(), baselines.values(), strict=True),
            *zip(groups.values(), spreads.values(), strict=True),
        ]
    ]
    return Section(
        f"Final held-out loss by {view.x}",
        "At the end of the same number of tokens, lower is better. Bars are the standard deviation "
        "over seeds.",
        [draw_picture("final-loss.png", "Final held-out loss", draw)] if spreads else [],
        rows,
        is_open=True,
    )


def degradation_section(view: View) -> Section:
    """Return by how much the final losses are above those of data-parallel training."""
    spreads, rows = {}, []
    for key, group in view.groups().items():
        pairs = [(run.loss, view.baseline(run)) for run in group]
        values = [degradation(loss, own) for loss, own in pairs if own is not None]
        if values:
            spreads[key] = spread(values)
            rows.append({**view.columns(group), **_spread_columns(spreads[key], "per cent", 2)})

    def draw(axes: Axes) -> None:
        _draw_spreads(view, axes, spreads)
        axes.axhline(0, **baseline_style(0, "data-parallel"))
        axes.set_ylabel("above data-parallel, per cent")

    return Section(
        "Degradation over data-parallel training",
        "By how many per cent the final loss is above the mean of the data-parallel runs with the "
        "same inner optimizer.",
        [draw_picture("degradation.png", "Degradation over data-parallel", draw)]
        if spreads
        else [],
        rows,
        is_open=True,
    )


def _draw_spreads(view: View, axes: Axes, spreads: Mapping[tuple[str, str], Spread]) -> None:
    for number, line in enumerate(view.line_names):
        points = [(view.place(x), value) for (own, x), value in spreads.items() if own == line]
        with_bars = any(value.count > 1 for _, value in points)
        axes.errorbar(
            [place for place, _ in points],
            [value.mean for _, value in points],
            yerr=[value.deviation for _, value in points] if with_bars else None,
            capsize=4,
            linestyle="-" if view.numeric else "none",
            **line_style(number, f"{view.lines} {line}" if is_number(line) else line),
        )
    view.label_x(axes)


def _spread_columns(value: Spread, what: str, digits: int) -> dict[str, str]:
    deviation = f"{value.deviation:.{digits}f}" if value.count > 1 else "one seed"
    return {
        what: f"{value.mean:.{digits}f}",
        "deviation": deviation,
        "seeds": str(value.count),
    }


def _tuned(group: Sequence[Outcome]) -> str:
    found = dict.fromkeys(
        ", ".join(f"{key} = {value:g}" for key, value in outcome.tuned.items()) for outcome in group
    )
    return "; ".join(text for text in found if text) or "-"
