"""How the runs went: loss curves, tuning, what the merge saw, times."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from simulations.outcome import Outcome
from simulations.report.page import Section, Table
from simulations.report.pictures import (
    COLORS,
    Picture,
    baseline_style,
    columns,
    draw_picture,
    file_part,
    line_style,
    zoom,
)
from simulations.report.view import View, is_number

__all__ = ["curve_section", "diagnostics_sections", "time_section", "tuning_section"]

_PARTS = ("load-seconds", "train-seconds", "save-seconds", "aggregate-seconds", "seconds")


def curve_section(view: View, over: str) -> Section:
    """Return loss curves: a picture for each value of x, or one where the lines have but one.

    Parameters
    ----------
    view : View
        The runs.
    over : {"tokens", "bytes"}
        What the loss is drawn against.
    """
    word = {"tokens": "tokens, millions", "bytes": "MB a worker"}[over]

    def along(run: Outcome) -> list[float]:
        numbers = (
            [row["tokens"] for row in run.rows] if over == "tokens" else run.bytes_per_worker()
        )
        return [number / 1e6 for number in numbers]

    def curve(group: Sequence[Outcome]) -> list[tuple[float, float]]:
        points = _mean_curve(group, along)
        return points[1:] if over == "bytes" else points  # round 0 has sent nothing

    by_line = len(view.line_names) > 1 or view.numeric
    axis, panels = (view.x, view.x_names) if by_line else (view.lines, view.line_names)
    member_axis, members = (view.lines, view.line_names) if by_line else (view.x, view.x_names)
    curves = {key if by_line else key[::-1]: curve(runs) for key, runs in view.groups().items()}
    baselines = {name: curve(runs) for name, runs in view.baseline_groups().items()}

    def draw_panel(axes: Axes, panel: str) -> None:
        for number, member in enumerate(members):
            if points := curves.get((member, panel)):
                label = f"{member_axis} {member}" if is_number(member) else member
                axes.plot(*columns(points), markersize=3, **line_style(number, label))
        for number, (name, points) in enumerate(baselines.items()):
            axes.plot(*columns(points), **baseline_style(number, name))
        if over == "bytes":
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=word, ylabel="held-out loss", title=f"{axis}: {panel}")
        zoom(axes)

    pictures = [
        draw_picture(
            f"loss-{over}-{file_part(panel)}.png",
            f"Loss against {over}, {panel}",
            partial(draw_panel, panel=panel),
        )
        for panel in panels
    ]
    table: Table = [
        {"runs": name, word: f"{place:.4g}", "loss": f"{loss:.4f}"}
        for name, points in {
            **baselines,
            **{f"{member}, {axis} {panel}": curves[member, panel] for member, panel in curves},
        }.items()
        for place, loss in points
    ]
    text = {
        "tokens": "Held-out loss over the tokens that all workers together have read, mean over "
        "seeds.",
        "bytes": "Held-out loss over the bytes that one worker has sent and received. A "
        "data-parallel worker is taken to send a gradient and receive a parameter of four bytes at "
        "every step: computed, not measured.",
    }[over]
    heading = {"tokens": "Loss against tokens", "bytes": "Loss against bytes sent"}[over]
    return Section(heading, text, pictures, table)


def _mean_curve(
    group: Sequence[Outcome], along: Callable[[Outcome], list[float]]
) -> list[tuple[float, float]]:
    """Return the mean loss over seeds at the rounds that were evaluated."""
    places = along(group[0])
    curve = []
    for number, place in enumerate(places):
        values = [run.rows[number]["eval-loss"] for run in group if number < len(run.rows)]
        if all(value is not None for value in values):
            curve.append((place, statistics.fmean(values)))
    return curve


def tuning_section(view: View, tuning: Sequence[Outcome]) -> Section:
    """Return the losses over each tuned key."""
    keys = list(dict.fromkeys(key for run in tuning for key in run.tuned))
    table: Table = []
    for run in tuning:
        fixed = {axis: name for axis, name in run.point.items() if axis != "seed"}
        values = {key: f"{run.tuned[key]:g}" if key in run.tuned else "-" for key in keys}
        table.append({**fixed, **values, "loss": f"{run.loss:.4f}"})
    panels: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for run in tuning:
        for key in run.tuned:
            others = [
                f"{axis} {name}" if is_number(name) else name
                for axis, name in run.point.items()
                if axis not in ("seed", view.lines)
            ]
            others += [f"{other}={run.tuned[other]:g}" for other in run.tuned if other != key]
            lines = panels.setdefault((key, run.point[view.lines]), {})
            lines.setdefault(" ".join(others), []).append((run.tuned[key], run.loss))

    def draw_panel(axes: Axes, key: str, panel: str) -> None:
        lines = panels[key, panel]
        for number, (name, points) in enumerate(lines.items()):
            axes.plot(*columns(sorted(points)), **line_style(number, name))
        axes.set(xlabel=key, ylabel="held-out loss", xscale="log", title=panel)
        ticks = sorted({place for points in lines.values() for place, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
        axes.xaxis.set_minor_formatter(NullFormatter())

    pictures = [
        draw_picture(
            f"tuning-{file_part(key)}-{file_part(panel)}.png",
            f"Loss over {key}, {panel}",
            partial(draw_panel, key=key, panel=panel),
        )
        for key, panel in panels
    ]
    text = "Every grid that was tried before the comparison; the best of each is what is compared."
    return Section("Tuning", text, pictures, table)


def diagnostics_sections(view: View) -> list[Section]:
    """Return what the merge saw, mean over the matrices that were looked at and over seeds."""
    seen = [run for run in view.merged if any("diagnostics" in row for row in run.rows)]
    if not seen:
        return []
    keys = list(
        dict.fromkeys(
            key
            for run in seen
            for row in run.rows
            for figures in row.get("diagnostics", {}).values()
            for key in figures
        )
    )
    matrices = sorted(
        {name for run in seen for row in run.rows for name in row.get("diagnostics", {})}
    )
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {key: {} for key in keys}
    table: Table = []
    for (line, x), group in view.groups().items():
        place = f"{view.x} {x}" if is_number(x) else x
        name = f"{line}, {place}" if len(view.line_names) > 1 else place
        means = {}
        for key in keys:
            by_round: dict[int, list[float]] = {}
            for run in group:
                for row in run.rows:
                    for figures in row.get("diagnostics", {}).values():
                        if figures.get(key) is not None:
                            by_round.setdefault(row["round"], []).append(figures[key])
            if by_round:
                curve = [(number, statistics.fmean(v)) for number, v in sorted(by_round.items())]
                curves[key][name] = curve
                means[key] = f"{statistics.fmean(value for _, value in curve):.4g}"
        if means:
            own = {view.lines: line, view.x: x}
            table.append(own | {key: means.get(key, "-") for key in keys})

    def picture(key: str) -> Picture:
        def draw(axes: Axes) -> None:
            for number, (name, curve) in enumerate(curves[key].items()):
                style = ("-", "--", ":")[number // len(COLORS) % 3]
                color = COLORS[number % len(COLORS)]
                label = name if len(curves[key]) <= 9 else None
                axes.plot(*zip(*curve, strict=True), linestyle=style, color=color, label=label)
            axes.set(xlabel="round", ylabel=key)
            if key.startswith("condition"):
                axes.set_yscale("log")

        return draw_picture(f"diagnostics-{file_part(key)}.png", key, draw)

    text = (
        "What the merge saw each round, mean over the matrices "
        + ", ".join(matrices)
        + " and over seeds; the table has the mean over the rounds. Interference is the norm of "
        "the mean pseudo-gradient over the mean of the workers' norms."
    )
    drawn = [picture(key) for key in keys if curves[key]]
    return [Section("What the merge saw", text, drawn, table)]


def time_section(view: View) -> Section:
    """Return how long the parts of a round took, and what was sent."""
    table: Table = []
    for group in [*view.baseline_groups().values(), *view.groups().values()]:
        rows = [row for run in group for row in run.rows if row["round"] > 0]
        parts = {}
        for key in _PARTS:
            values = [row[key] for row in rows if row.get(key) is not None]
            parts[key] = f"{statistics.fmean(values):.3f}" if values else "-"
        megabytes = statistics.fmean(run.bytes_per_worker()[-1] / 1e6 for run in group)
        minutes = statistics.fmean(run.seconds / 60 for run in group)
        table.append(
            {
                **view.columns(group),
                **parts,
                "MB a worker": f"{megabytes:.1f}",
                "minutes a run": f"{minutes:.1f}",
            }
        )
    return Section(
        "Time and bytes",
        "Means over all rounds. Loading, training and saving are a worker's (mean over workers); "
        "aggregation is the server's; seconds is the whole round, with the evaluation.",
        [],
        table,
        is_open=True,
    )
