"""One HTML page and its pictures from the finished runs of an experiment."""

import base64
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from simulations.experiment import Experiment, Scale, app_config, final_runs, tuning_runs
from simulations.outcome import Outcome, write_results

__all__ = ["Spread", "Unfinished", "degradation", "spread", "write_report"]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#6A3D9A")
"""Colours that colour-blind people can tell apart (Okabe and Ito), and two more."""
MARKERS = "osD^vPX*"

_PARTS = ("load-seconds", "train-seconds", "save-seconds", "aggregate-seconds", "seconds")

Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Unfinished:
    """A run that the experiment has, but that has no result."""

    run: str
    """Its id."""
    reason: str
    """Why not."""


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    mean: float
    """Mean over the seeds."""
    deviation: float
    """Sample standard deviation; 0 with one seed."""
    count: int
    """Seeds."""


@dataclass(frozen=True)
class _Picture:
    file: str
    caption: str
    data: bytes


@dataclass(frozen=True)
class _Section:
    heading: str
    text: str
    pictures: Sequence[_Picture]
    table: Table


def spread(values: Sequence[float]) -> Spread:
    """Return mean and sample standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(statistics.fmean(values), deviation, len(values))


def degradation(loss: float, baseline: float) -> float:
    """Return by how many per cent a loss is above that of data-parallel training."""
    return 100 * (loss / baseline - 1)


def write_report(
    experiment: Experiment,
    scale_name: str,
    outcomes: Sequence[Outcome],
    unfinished: Sequence[Unfinished],
    output: Path,
) -> Path:
    """Write index.html, the pictures and results.jsonl.

    Parameters
    ----------
    experiment : Experiment
        The experiment.
    scale_name : str
        Which of its scales.
    outcomes : Sequence[Outcome]
        All its finished runs, those of the tuning among them.
    unfinished : Sequence[Unfinished]
        What could not be run.
    output : Path
        Folder for the files; made if missing.

    Returns
    -------
    Path
        The page.
    """
    output.mkdir(parents=True, exist_ok=True)
    scale = experiment.scales[scale_name]
    losses = {outcome.run: outcome.loss for outcome in outcomes}
    names = {run.name for run in final_runs(scale, losses)[0]}
    final = [outcome for outcome in outcomes if outcome.run in names]
    tuning_names = {run.name for run in tuning_runs(scale)}
    tuning = [outcome for outcome in outcomes if outcome.run in tuning_names]
    view = _View(experiment, scale, final)
    sections = [
        _final_losses(view),
        _degradations(view),
        _curves(view, "tokens"),
        _curves(view, "bytes"),
        _tuning(view, tuning),
        *_diagnostics(view),
        _times(view),
    ]
    for section in sections:
        for picture in section.pictures:
            (output / picture.file).write_bytes(picture.data)
    page = output / "index.html"
    page.write_text(_page(experiment, scale_name, outcomes, unfinished, sections))
    write_results(output / "results.jsonl", outcomes)
    return page


class _View:
    """The final runs, by the axes that the report shows."""

    def __init__(self, experiment: Experiment, scale: Scale, final: Sequence[Outcome]) -> None:
        self.x, self.lines = experiment.report.x, experiment.report.lines
        self.final = final
        self.merged = [outcome for outcome in final if not outcome.data_parallel]
        self.baselines = [outcome for outcome in final if outcome.data_parallel]
        self.x_names = self._present(scale, self.x)
        self.line_names = self._present(scale, self.lines)
        self.numeric = len(self.x_names) > 1 and all(_is_number(name) for name in self.x_names)

    def _present(self, scale: Scale, axis: str) -> list[str]:
        here = {outcome.point[axis] for outcome in self.merged}
        return [option.name for option in scale.axes[axis] if option.name in here]

    def groups(self) -> dict[tuple[str, str], list[Outcome]]:
        """Return the runs by line and x: they differ by their seed alone."""
        found: dict[tuple[str, str], list[Outcome]] = {}
        for line in self.line_names:
            for x in self.x_names:
                runs = [
                    outcome
                    for outcome in self.merged
                    if (outcome.point[self.lines], outcome.point[self.x]) == (line, x)
                ]
                if runs:
                    found[line, x] = runs
        return found

    def baseline_groups(self) -> dict[str, list[Outcome]]:
        """Return the data-parallel runs by their inner optimizer."""
        found: dict[str, list[Outcome]] = {}
        for outcome in self.baselines:
            found.setdefault(_inner_optimizer(outcome), []).append(outcome)
        return found

    def baseline(self, outcome: Outcome) -> float | None:
        """Return the mean loss of data-parallel training with a run's inner optimizer."""
        group = self.baseline_groups().get(_inner_optimizer(outcome))
        return statistics.fmean(run.loss for run in group) if group else None

    def place(self, x: str) -> float:
        """Return where a value of x is drawn."""
        return float(x) if self.numeric else float(self.x_names.index(x))

    def label_x(self, axes: Axes) -> None:
        """Label the horizontal axis."""
        axes.set_xlabel(
            {"workers": "workers R", "inner.steps": "inner steps H"}.get(self.x, self.x)
        )
        if not self.numeric:
            axes.set_xticks(range(len(self.x_names)), self.x_names, rotation=30, ha="right")
            axes.set_xlim(-0.5, max(len(self.x_names), 1) - 0.5)
        elif max(map(float, self.x_names)) >= 8 * min(map(float, self.x_names)) > 0:
            axes.set_xscale("log", base=2)
        if self.numeric:
            axes.set_xticks([float(x) for x in self.x_names], self.x_names)
            axes.xaxis.set_minor_formatter(NullFormatter())


def _style(number: int, label: str) -> dict[str, Any]:
    """Return how a picture's line of this number is drawn."""
    return {
        "color": COLORS[number % len(COLORS)],
        "marker": MARKERS[number % len(MARKERS)],
        "label": label,
    }


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is_word(text: str) -> bool:
    return not _is_number(text)


def _inner_optimizer(outcome: Outcome) -> str:
    return str(outcome.run_config.get("inner.optimizer", app_config()["inner.optimizer"]))


def _picture(file: str, caption: str, draw: Callable[[Axes], None]) -> _Picture:
    with pyplot.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(figsize=(5.6, 3.9), layout="constrained")
        draw(axes)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=10)
        buffer = BytesIO()
        # No date: the same results give the same bytes.
        figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
        pyplot.close(figure)
    return _Picture(file, caption, buffer.getvalue())


def _draw_spreads(view: _View, axes: Axes, spreads: Mapping[tuple[str, str], Spread]) -> None:
    for number, line in enumerate(view.line_names):
        points = [(view.place(x), value) for (own, x), value in spreads.items() if own == line]
        axes.errorbar(
            [place for place, _ in points],
            [value.mean for _, value in points],
            yerr=[value.deviation for _, value in points],
            capsize=4,
            linestyle="-" if view.numeric else "none",
            **_style(number, line if _is_word(line) else f"{view.lines} {line}"),
        )
    view.label_x(axes)


def _final_losses(view: _View) -> _Section:
    spreads = {key: spread([run.loss for run in group]) for key, group in view.groups().items()}
    baselines = {
        name: spread([run.loss for run in group]) for name, group in view.baseline_groups().items()
    }

    def draw(axes: Axes) -> None:
        _draw_spreads(view, axes, spreads)
        for number, (name, value) in enumerate(baselines.items()):
            label = "data-parallel" if len(baselines) == 1 else f"data-parallel, {name}"
            style = ("--", ":", "-.")[number % 3]
            axes.axhline(value.mean, color="0.35", linestyle=style, label=label)
            if value.deviation:
                low, high = value.mean - value.deviation, value.mean + value.deviation
                axes.axhspan(low, high, color="0.35", alpha=0.12, linewidth=0)
        axes.set_ylabel("held-out loss, nats a token")

    rows: Table = [
        {view.lines: "data-parallel", view.x: name, **_spread_columns(value, "loss", 4)}
        for name, value in baselines.items()
    ]
    rows += [
        {view.lines: line, view.x: x, **_spread_columns(value, "loss", 4), "tuned": _tuned(group)}
        for ((line, x), value), group in zip(spreads.items(), view.groups().values(), strict=True)
    ]
    for row in rows:
        row.setdefault("tuned", _tuned(view.baseline_groups().get(row[view.x], [])))
    return _Section(
        f"Final held-out loss by {view.x}",
        "At the end of the same number of tokens. Bars are the standard deviation over seeds.",
        [_picture("final-loss.png", "Final held-out loss", draw)] if spreads else [],
        rows,
    )


def _spread_columns(value: Spread, what: str, digits: int) -> dict[str, str]:
    deviation = f"{value.deviation:.{digits}f}" if value.count > 1 else "one seed"
    return {
        what: f"{value.mean:.{digits}f}",
        "standard deviation": deviation,
        "seeds": str(value.count),
    }


def _tuned(group: Sequence[Outcome]) -> str:
    found = dict.fromkeys(
        ", ".join(f"{key} = {value:g}" for key, value in outcome.tuned.items()) for outcome in group
    )
    return "; ".join(text for text in found if text) or "-"


def _degradations(view: _View) -> _Section:
    spreads = {}
    for key, group in view.groups().items():
        baselines = [view.baseline(run) for run in group]
        values = [
            degradation(run.loss, baseline)
            for run, baseline in zip(group, baselines, strict=True)
            if baseline is not None
        ]
        if values:
            spreads[key] = spread(values)

    def draw(axes: Axes) -> None:
        _draw_spreads(view, axes, spreads)
        axes.axhline(0, color="0.35", linestyle="--")
        axes.set_ylabel("above data-parallel, per cent")

    table = [
        {view.lines: line, view.x: x, **_spread_columns(value, "per cent", 2)}
        for (line, x), value in spreads.items()
    ]
    return _Section(
        "Degradation over data-parallel training",
        "By how many per cent the final loss is above the mean of the data-parallel runs with the "
        "same inner optimizer.",
        [_picture("degradation.png", "Degradation over data-parallel", draw)] if spreads else [],
        table,
    )


def _curves(view: _View, over: str) -> _Section:
    """Draw loss curves: a picture for each value of x, or one where the lines have but one."""
    unit, word = {"tokens": (1e6, "tokens, millions"), "bytes": (1e6, "MB a worker")}[over]

    def along(run: Outcome) -> list[float]:
        numbers = (
            [row["tokens"] for row in run.rows] if over == "tokens" else run.bytes_per_worker()
        )
        return [number / unit for number in numbers]

    def curve(group: Sequence[Outcome]) -> list[tuple[float, float]]:
        points = _mean_curve(group, along)
        return points[1:] if over == "bytes" else points  # round 0 has sent nothing

    by_line = len(view.line_names) > 1 or view.numeric
    panels = view.x_names if by_line else view.line_names
    members = view.line_names if by_line else view.x_names
    curves = {key if by_line else key[::-1]: curve(runs) for key, runs in view.groups().items()}
    baselines = {name: curve(runs) for name, runs in view.baseline_groups().items()}

    def draw_panel(axes: Axes, panel: str) -> None:
        for number, member in enumerate(members):
            if points := curves.get((member, panel)):
                axes.plot(*_columns(points), markersize=3, **_style(number, member))
        for number, (name, points) in enumerate(baselines.items()):
            label = "data-parallel" if len(baselines) == 1 else f"data-parallel, {name}"
            style = ("--", ":", "-.")[number % 3]
            axes.plot(*_columns(points), color="0.35", linestyle=style, label=label)
        if over == "bytes":
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_formatter(NullFormatter())
        axis = view.x if by_line else view.lines
        axes.set(xlabel=word, ylabel="held-out loss", title=f"{axis}: {panel}")
        _zoom(axes)

    pictures = [
        _picture(
            f"loss-{over}-{_slug(panel)}.png",
            f"Loss against {over}, {panel}",
            partial(draw_panel, panel=panel),
        )
        for panel in panels
    ]
    table: Table = [
        {"runs": name, word: f"{place:.4g}", "loss": f"{loss:.4f}"}
        for name, points in {
            **{f"data-parallel, {name}": points for name, points in baselines.items()},
            **{", ".join(key): points for key, points in curves.items()},
        }.items()
        for place, loss in _some(points)
    ]
    text = {
        "tokens": "Held-out loss over the tokens that all workers together have read, mean over "
        "seeds. The table has some of the points.",
        "bytes": "Held-out loss over the bytes that one worker has sent and received. A "
        "data-parallel worker is taken to send a gradient and receive a parameter of four bytes at "
        "every step: computed, not measured.",
    }[over]
    heading = {"tokens": "Loss against tokens", "bytes": "Loss against bytes sent"}[over]
    return _Section(heading, text, pictures, table)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [place for place, _ in points], [value for _, value in points]


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


def _some(points: Sequence[tuple[float, float]], count: int = 6) -> list[tuple[float, float]]:
    """Return so many of the points, evenly spaced, the last among them."""
    last = len(points) - 1
    chosen = sorted({round(last * number / (count - 1)) for number in range(count)})
    return [points[number] for number in chosen] if points else []


def _zoom(axes: Axes) -> None:
    """Leave the start of training, which hides all else, above the picture."""
    values = [value for line in axes.lines for value in _numbers(line.get_ydata())]
    finite = sorted(value for value in values if math.isfinite(value))
    if finite:
        low, high = finite[0], finite[int(0.85 * (len(finite) - 1))]
        margin = 0.05 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


def _numbers(data: Any) -> Iterable[float]:
    return (float(value) for value in data)


def _slug(text: str) -> str:
    return "".join(sign if sign.isalnum() or sign in ".-" else "-" for sign in text)


def _tuning(view: _View, tuning: Sequence[Outcome]) -> _Section:
    """Draw the losses over each tuned key."""
    keys = list(dict.fromkeys(key for run in tuning for key in run.tuned))
    table: Table = []
    for run in tuning:
        fixed = {axis: name for axis, name in run.point.items() if axis != "seed"}
        values = {key: f"{run.tuned[key]:g}" if key in run.tuned else "-" for key in keys}
        table.append({**fixed, **values, "loss": f"{run.loss:.4f}"})
    panels: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for run in tuning:
        for key in run.tuned:
            others = [run.point[axis] for axis in run.point if axis not in ("seed", view.lines)]
            others += [f"{other}={run.tuned[other]:g}" for other in run.tuned if other != key]
            lines = panels.setdefault((key, run.point[view.lines]), {})
            lines.setdefault(" ".join(others), []).append((run.tuned[key], run.loss))

    def draw_panel(axes: Axes, key: str, panel: str) -> None:
        lines = panels[key, panel]
        for number, (name, points) in enumerate(lines.items()):
            axes.plot(*_columns(sorted(points)), **_style(number, name))
        axes.set(xlabel=key, ylabel="held-out loss", xscale="log", title=panel)
        ticks = sorted({place for points in lines.values() for place, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
        axes.xaxis.set_minor_formatter(NullFormatter())

    pictures = [
        _picture(
            f"tuning-{_slug(key)}-{_slug(panel)}.png",
            f"Loss over {key}, {panel}",
            partial(draw_panel, key=key, panel=panel),
        )
        for key, panel in panels
    ]
    text = "Every grid that was tried before the comparison; the best of each is what is compared."
    if not tuning:
        text = "This experiment tunes nothing: its values are those of its file."
    return _Section("Tuning", text, pictures, table)


def _diagnostics(view: _View) -> list[_Section]:
    """Draw what the merge saw, mean over the matrices that were looked at and over seeds."""
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
        name = f"{line}, {x}" if len(view.line_names) > 1 else x
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

    def picture(key: str) -> _Picture:
        def draw(axes: Axes) -> None:
            for number, (name, curve) in enumerate(curves[key].items()):
                style = ("-", "--", ":")[number // len(COLORS) % 3]
                color = COLORS[number % len(COLORS)]
                label = name if len(curves[key]) <= 9 else None
                axes.plot(*zip(*curve, strict=True), linestyle=style, color=color, label=label)
            axes.set(xlabel="round", ylabel=key)
            if key.startswith("condition"):
                axes.set_yscale("log")

        return _picture(f"diagnostics-{_slug(key)}.png", key, draw)

    text = (
        "What the merge saw each round, mean over the matrices "
        + ", ".join(matrices)
        + " and over seeds; the table has the mean over the rounds. Interference is the norm of "
        "the mean pseudo-gradient over the mean of the workers' norms."
    )
    drawn = [picture(key) for key in keys if curves[key]]
    return [_Section("What the merge saw", text, drawn, table)]


def _times(view: _View) -> _Section:
    table: Table = []
    for (line, x), group in {
        **{("data-parallel", name): runs for name, runs in view.baseline_groups().items()},
        **view.groups(),
    }.items():
        rows = [row for run in group for row in run.rows if row["round"] > 0]
        parts = {}
        for key in _PARTS:
            values = [row[key] for row in rows if row.get(key) is not None]
            parts[key] = f"{statistics.fmean(values):.3f}" if values else "-"
        megabytes = statistics.fmean(run.bytes_per_worker()[-1] / 1e6 for run in group)
        minutes = statistics.fmean(run.seconds / 60 for run in group)
        table.append(
            {
                view.lines: line,
                view.x: x,
                **parts,
                "MB a worker": f"{megabytes:.1f}",
                "minutes a run": f"{minutes:.1f}",
            }
        )
    return _Section(
        "Time and bytes",
        "Means over all rounds. Loading, training and saving are a worker's (mean over workers); "
        "aggregation is the server's; seconds is the whole round, with the evaluation.",
        [],
        table,
    )


_STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1200px;padding:16px;font:16px/1.5 system-ui,sans-serif;color:#1a1a1a;
background:#fff;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.2}h2{font-size:1.25rem;margin-top:2rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;font-size:.875rem}
dt{color:#555}dd{margin:0}
@media(max-width:600px){dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:6px}}
.pictures{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
.pictures figure{margin:0;max-width:620px}
img{max-width:100%;height:auto;display:block}
figcaption{font-size:.875rem;color:#555}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.875rem;overflow-wrap:normal}
th,td{padding:4px 10px;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}
td.number{text-align:right;font-variant-numeric:tabular-nums}
pre{overflow-x:auto;background:#f4f4f4;padding:8px;font-size:.8rem;max-width:100%}
summary{cursor:pointer;padding:4px 0}
"""


def _page(
    experiment: Experiment,
    scale_name: str,
    outcomes: Sequence[Outcome],
    unfinished: Sequence[Unfinished],
    sections: Sequence[_Section],
) -> str:
    parts = [
        f"<h1>{escape(experiment.title)}</h1>",
        f"<p>{escape(experiment.question)}</p>",
        "<dl>"
        + "".join(
            f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>"
            for key, value in _facts(experiment, scale_name, outcomes).items()
        )
        + "</dl>",
    ]
    for section in sections:
        parts.append(f"<section><h2>{escape(section.heading)}</h2><p>{escape(section.text)}</p>")
        if section.pictures:
            parts.append('<div class="pictures">')
            parts += [_html_picture(picture) for picture in section.pictures]
            parts.append("</div>")
        if section.table:
            parts.append(f"<details{'' if section.pictures else ' open'}><summary>Table</summary>")
            parts.append(_html_table(section.table) + "</details>")
        elif not section.pictures:
            parts.append("<p>No finished run has this.</p>")
        parts.append("</section>")
    parts.append("<section><h2>What could not be run</h2>")
    if unfinished:
        rows = [{"run": one.run, "why": one.reason} for one in unfinished]
        parts.append(_html_table(rows))
    else:
        parts.append("<p>Nothing: every run of the experiment has finished.</p>")
    parts.append("</section>")
    parts.append(_commands(experiment, scale_name, outcomes))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(experiment.title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _facts(experiment: Experiment, scale_name: str, outcomes: Sequence[Outcome]) -> dict[str, str]:
    scale = experiment.scales[scale_name]
    config = {**app_config(), **scale.config}
    facts = {
        "scale": scale_name,
        "model": f"{config['model.preset']}, data {config['data.source']}",
        "tokens of every run": f"{scale.budget_tokens:,}",
        "global batch": f"{config['global-batch-size']} sequences",
        "finished runs": str(len(outcomes)),
        "time of their rounds together": f"{sum(run.seconds for run in outcomes) / 3600:.2f} h",
    }
    if outcomes:
        facts["parameters"] = f"{outcomes[0].num_parameters:,}"
        versions = sorted({f"{k} {v}" for run in outcomes for k, v in run.versions.items()})
        facts["versions"] = ", ".join(versions)
    return facts


def _html_picture(picture: _Picture) -> str:
    data = base64.b64encode(picture.data).decode()
    caption = escape(picture.caption, quote=True)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _html_table(rows: Table) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(_cell(str(row.get(key, "-"))) for key in rows[0]) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _cell(text: str) -> str:
    kind = ' class="number"' if _is_number(text) else ""
    return f"<td{kind}>{escape(text)}</td>"


def _commands(experiment: Experiment, scale_name: str, outcomes: Sequence[Outcome]) -> str:
    scale = "" if scale_name == "laptop" else f" --scale {scale_name}"
    sweep = "\n".join(
        f"python -m simulations {word} {experiment.name}{scale}" for word in ("run", "report")
    )
    single = "\n\n".join(f"# {run.run}\n{run.command}" for run in outcomes)
    return (
        f"<section><h2>Commands</h2><pre>{escape(sweep)}</pre><details><summary>Each run by "
        "itself, in the project's folder, with FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 set"
        f"</summary><pre>{escape(single)}</pre></details></section>"
    )
