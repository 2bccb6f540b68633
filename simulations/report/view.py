"""The runs that answer an experiment's question, by the axes that its report shows."""

import math
import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from simulations.experiment import Experiment, Scale, app_config
from simulations.outcome import Outcome

__all__ = ["View", "is_number"]

_AXIS_LABELS = {"workers": "workers R", "inner.steps": "inner steps H"}
_LEVEL_LABELS = 32
"""Characters of all labels below a picture that have room side by side."""


class View:
    """The final runs of an experiment.

    Parameters
    ----------
    experiment : Experiment
        The experiment.
    scale : Scale
        Which of its scales.
    final : Sequence[Outcome]
        Finished runs that answer its question.
    """

    def __init__(self, experiment: Experiment, scale: Scale, final: Sequence[Outcome]) -> None:
        self.x, self.lines = experiment.report.x, experiment.report.lines
        self.merged = [outcome for outcome in final if not outcome.data_parallel]
        self.baselines = [outcome for outcome in final if outcome.data_parallel]
        self.x_names = self._present(scale, self.x)
        self.line_names = self._present(scale, self.lines)
        self.numeric = len(self.x_names) > 1 and all(is_number(name) for name in self.x_names)

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
        """Return the data-parallel runs by how a picture calls them."""
        by_optimizer: dict[str, list[Outcome]] = {}
        for outcome in self.baselines:
            by_optimizer.setdefault(_inner_optimizer(outcome), []).append(outcome)
        if len(by_optimizer) == 1:
            return {"data-parallel": self.baselines}
        return {f"data-parallel, {name}": runs for name, runs in by_optimizer.items()}

    def baseline(self, outcome: Outcome) -> float | None:
        """Return the mean loss of data-parallel training with a run's inner optimizer."""
        losses = [
            run.loss for run in self.baselines if _inner_optimizer(run) == _inner_optimizer(outcome)
        ]
        return statistics.fmean(losses) if losses else None

    def place(self, x: str) -> float:
        """Return where a value of x is drawn."""
        return float(x) if self.numeric else float(self.x_names.index(x))

    def columns(self, group: Sequence[Outcome]) -> dict[str, str]:
        """Return the first columns of a group's row in a table."""
        return {axis: group[0].point[axis] for axis in (self.lines, self.x)}

    def label_x(self, axes: Axes) -> None:
        """Label the horizontal axis."""
        axes.set_xlabel(_AXIS_LABELS.get(self.x, self.x))
        if self.numeric:
            if max(map(float, self.x_names)) >= 8 * min(map(float, self.x_names)) > 0:
                axes.set_xscale("log", base=2)
            axes.set_xticks([float(x) for x in self.x_names], self.x_names)
            axes.xaxis.set_minor_formatter(NullFormatter())
            return
        axes.set_xticks(range(len(self.x_names)), self.x_names)
        if sum(map(len, self.x_names)) > _LEVEL_LABELS:
            axes.tick_params("x", rotation=40)
            for label in axes.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.5, max(len(self.x_names), 1) - 0.5)


def is_number(text: str) -> bool:
    """Tell whether a text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _inner_optimizer(outcome: Outcome) -> str:
    return str(outcome.run_config.get("inner.optimizer", app_config()["inner.optimizer"]))
