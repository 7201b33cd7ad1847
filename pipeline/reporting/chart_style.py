"""How charts look in reports: their colours, their panels, and their way into a page."""

from __future__ import annotations

import io

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, ACCENT, PALE = "#24292f", "#2f6f4f", "#c9d8cf"
COLUMNS = 3  # small pictures side by side


def panels(count: int, height: float, columns: int = COLUMNS) -> tuple[Figure, list[Axes]]:
    """`count` pictures, `columns` side by side, unused places hidden; heights in inches."""
    columns = min(columns, max(1, count))
    rows = -(-max(1, count) // columns)
    figure = Figure(figsize=(9.6, height * rows + 0.5), layout="constrained")
    found = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in found[count:]:
        axes.set_visible(False)
    return figure, found


def head(axes: Axes, title: str) -> None:
    """A title, and no frame."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)


def to_svg(figure: Figure) -> str:
    """An <svg> element that can stand in a page beside others."""
    sink = io.StringIO()
    # Names inside one page must differ from figure to figure, yet the page must not change from run to run.
    with mpl.rc_context({"svg.hashsalt": "skipdecode", "svg.fonttype": "path"}):
        figure.savefig(sink, format="svg", metadata={"Date": None})
    text = sink.getvalue()
    return text[text.index("<svg") :]
