"""How the pictures of a report are drawn."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

__all__ = [
    "COLORS",
    "Picture",
    "baseline_style",
    "columns",
    "draw_picture",
    "file_part",
    "line_style",
    "zoom",
]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#6A3D9A")
"""Colours that colour-blind people can tell apart (Okabe and Ito), and two more."""
_MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Picture:
    """A picture of a report."""

    file: str
    """Name of its file."""
    caption: str
    """What it shows."""
    data: bytes
    """The PNG."""


def draw_picture(file: str, caption: str, draw: Callable[[Axes], None]) -> Picture:
    """Make a picture of what a function draws."""
    with pyplot.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(figsize=(5.6, 4.0), layout="constrained")
        draw(axes)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=11)
        buffer = BytesIO()
        # No date and no version: the same results give the same bytes.
        figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
        pyplot.close(figure)
    return Picture(file, caption, buffer.getvalue())


def line_style(number: int, label: str) -> dict[str, Any]:
    """Return how a picture's line of this number is drawn."""
    return {
        "color": COLORS[number % len(COLORS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "label": label,
    }


def baseline_style(number: int, label: str) -> dict[str, Any]:
    """Return how a picture's data-parallel line of this number is drawn."""
    return {"color": "0.35", "linestyle": ("--", ":", "-.")[number % 3], "label": label}


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the two coordinates of points apart."""
    return [place for place, _ in points], [value for _, value in points]


def zoom(axes: Axes) -> None:
    """Leave the start of training, which hides all else, above the picture."""
    # matplotlib gives back what it was given, lists of numbers here
    data: list[Any] = [line.get_ydata() for line in axes.lines]
    finite = sorted(value for line in data for value in line if math.isfinite(value))
    if finite:
        low, high = finite[0], finite[int(0.85 * (len(finite) - 1))]
        margin = 0.05 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


def file_part(text: str) -> str:
    """Return a text with only the signs that a file's name may have."""
    return "".join(sign if sign.isalnum() or sign in ".-" else "-" for sign in text)
