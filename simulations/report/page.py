"""The HTML page of a report, in one file that needs no other."""

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from simulations.experiment import Experiment, app_config, experiment_names
from simulations.outcome import Outcome
from simulations.report.pictures import Picture
from simulations.report.view import is_number

__all__ = ["Section", "Table", "Unfinished", "html_page"]

Table = list[dict[str, Any]]
"""Rows by column; the first row has all columns."""


@dataclass(frozen=True)
class Unfinished:
    """A run that the experiment has, but that has no result."""

    run: str
    """Its id."""
    reason: str
    """Why not."""


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    heading: str
    """What it is about."""
    text: str
    """How to read it."""
    pictures: Sequence[Picture]
    """Its pictures."""
    table: Table
    """The numbers behind the pictures."""
    is_open: bool = False
    """Whether the table is shown unasked."""


_STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1200px;padding:16px;font:16px/1.5 system-ui,sans-serif;color:#1a1a1a;
background:#fff;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0}
h2{font-size:1.25rem;line-height:1.3;margin:2.25rem 0 .25rem}
p{max-width:75ch;margin:.5rem 0 1rem}
.notice{border-left:4px solid #d55e00;background:#fdf1e8;padding:8px 12px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;font-size:.875rem}
dt{color:#555}dd{margin:0}
.side{display:grid;gap:16px 32px;align-items:start}
.side>*{min-width:0}
@media(min-width:900px){.side{grid-template-columns:minmax(0,560px) minmax(0,1fr)}}
@media(max-width:600px){dl{grid-template-columns:8rem 1fr}}
.pictures{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
figure{margin:0;max-width:560px}
img{max-width:100%;height:auto;display:block}
figcaption{font-size:.875rem;color:#555}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.875rem;overflow-wrap:normal}
th,td{padding:4px 10px;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}
td.long{white-space:normal;min-width:9rem}
th:first-child,td:first-child{padding-left:0;position:sticky;left:0;background:#fff}
th.number,td.number{text-align:right;font-variant-numeric:tabular-nums}
pre{overflow-x:auto;background:#f4f4f4;padding:8px;font-size:.8rem;max-width:100%}
summary{cursor:pointer;padding:4px 0}
"""

_LONG = 20
"""Characters from which on a cell's text may go over several lines."""


def html_page(
    experiment: Experiment,
    scale_name: str,
    outcomes: Sequence[Outcome],
    unfinished: Sequence[Unfinished],
    sections: Sequence[Section],
) -> str:
    """Return a page with everything in it: pictures, tables and style."""
    parts = [f"<h1>{escape(experiment.title)}</h1>", f"<p>{escape(experiment.question)}</p>"]
    if unfinished:
        parts.append(
            f'<p class="notice">Not complete: {len(outcomes)} runs have finished, '
            f'<a href="#unfinished">others have not</a>.</p>'
        )
    if lost := [f"{one.run} ({count})" for one in outcomes if (count := one.replies_lost())]:
        parts.append(
            '<p class="notice">Workers\' replies went into no outer step, so that less text has '
            f"decided these runs than the others: {escape(', '.join(lost))}.</p>"
        )
    facts = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>"
        for key, value in _facts(experiment, scale_name, outcomes).items()
    )
    parts.append(f"<dl>{facts}</dl>")
    parts += map(_html_section, sections)
    parts.append('<section id="unfinished"><h2>What could not be run</h2>')
    if unfinished:
        parts.append(_html_table([{"run": one.run, "why": one.reason} for one in unfinished]))
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


def _html_section(section: Section) -> str:
    shown = f"<h2>{escape(section.heading)}</h2><p>{escape(section.text)}</p>"
    if not section.table:
        return f"<section>{shown}<p>No finished run has this.</p></section>"
    pictures = "".join(map(_html_picture, section.pictures))
    state = " open" if section.is_open else ""
    table = f"<details{state}><summary>Table</summary>{_html_table(section.table)}</details>"
    if section.is_open and len(section.pictures) == 1:
        return f'<section>{shown}<div class="side">{pictures}{table}</div></section>'
    pictures = f'<div class="pictures">{pictures}</div>' if pictures else ""
    return f"<section>{shown}{pictures}{table}</section>"


def _facts(experiment: Experiment, scale_name: str, outcomes: Sequence[Outcome]) -> dict[str, str]:
    scale = experiment.scales[scale_name]
    config = {**app_config(), **scale.config}
    model = config["model.config"] or config["model.path"] or config["model.preset"]
    facts = {
        "scale": scale_name,
        "model": f"{model}, data {config['data.source']}",
        "tokens of every run": f"{scale.budget_tokens:,}",
        "global batch": f"{config['global-batch-size']} sequences",
        "finished runs": str(len(outcomes)),
        "time of all rounds": f"{sum(run.seconds for run in outcomes) / 3600:.2f} h",
    }
    if outcomes:
        facts["parameters"] = f"{outcomes[0].num_parameters:,}"
        versions = sorted({f"{k} {v}" for run in outcomes for k, v in run.versions.items()})
        facts["versions"] = ", ".join(versions)
    return facts


def _html_picture(picture: Picture) -> str:
    data = base64.b64encode(picture.data).decode()
    caption = escape(picture.caption, quote=True)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _html_table(rows: Table) -> str:
    cells = [[str(row.get(key, "-")) for key in rows[0]] for row in rows]
    kinds = [
        "number" if all(is_number(text) or text == "-" for text in column) else ""
        for column in zip(*cells, strict=True)
    ]
    head = "".join(
        f'<th class="{kind}">{escape(str(key))}</th>'
        for key, kind in zip(rows[0], kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(_cell(text, kind) for text, kind in zip(texts, kinds, strict=True))
        + "</tr>"
        for texts in cells
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _cell(text: str, kind: str) -> str:
    return f'<td class="{"long" if len(text) > _LONG else kind}">{escape(text)}</td>'


def _commands(experiment: Experiment, scale_name: str, outcomes: Sequence[Outcome]) -> str:
    scale = "" if scale_name == "laptop" else f" --scale {scale_name}"
    name = experiment.name
    place = name if name in experiment_names() else shlex.quote(f"{name}.toml")
    sweep = "\n".join(f"python -m simulations {word} {place}{scale}" for word in ("run", "report"))
    single = "\n\n".join(f"# {run.run}\n{run.command}" for run in outcomes)
    return (
        f"<section><h2>Commands</h2><pre>{escape(sweep)}</pre><details><summary>Each run by "
        "itself, in the project's folder, with FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 set"
        f"</summary><pre>{escape(single)}</pre></details></section>"
    )
