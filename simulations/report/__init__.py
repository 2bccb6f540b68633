"""One HTML page and its pictures from the finished runs of an experiment."""

from collections.abc import Sequence
from pathlib import Path

from simulations.experiment import Experiment, final_runs, tuning_runs
from simulations.outcome import Outcome, write_results
from simulations.report.course import (
    curve_section,
    diagnostics_sections,
    time_section,
    tuning_section,
)
from simulations.report.final import (
    Spread,
    degradation,
    degradation_section,
    loss_section,
    spread,
)
from simulations.report.page import Unfinished, html_page
from simulations.report.view import View

__all__ = ["Spread", "Unfinished", "degradation", "spread", "write_report"]


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
    final_names = {run.name for run in final_runs(scale, losses)[0]}
    tuning_names = {run.name for run in tuning_runs(scale)}
    view = View(experiment, scale, [run for run in outcomes if run.run in final_names])
    tuned = scale.tune is not None
    sections = [
        loss_section(view),
        degradation_section(view),
        curve_section(view, "tokens"),
        curve_section(view, "bytes"),
        *([tuning_section(view, [o for o in outcomes if o.run in tuning_names])] if tuned else []),
        *diagnostics_sections(view),
        time_section(view),
    ]
    for section in sections:
        for picture in section.pictures:
            (output / picture.file).write_bytes(picture.data)
    page = output / "index.html"
    page.write_text(html_page(experiment, scale_name, outcomes, unfinished, sections))
    write_results(output / "results.jsonl", outcomes)
    return page
