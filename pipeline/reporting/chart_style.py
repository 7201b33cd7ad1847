"""How charts look in reports: their colours, and their way into a page."""

from __future__ import annotations

import io

import matplotlib as mpl
from matplotlib.figure import Figure

INK, ACCENT, PALE = "#24292f", "#2f6f4f", "#c9d8cf"


def to_svg(figure: Figure) -> str:
    """An <svg> element that can stand in a page beside others."""
    sink = io.StringIO()
    # Names inside one page must differ from figure to figure, yet the page must not change from run to run.
    with mpl.rc_context({"svg.hashsalt": "skipdecode", "svg.fonttype": "path"}):
        figure.savefig(sink, format="svg", metadata={"Date": None})
    text = sink.getvalue()
    return text[text.index("<svg") :]
