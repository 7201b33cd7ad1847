"""Reports as pages: one file, no network; and how the charts in them look."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from jinja2 import ChoiceLoader, Environment, PackageLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

REPORT_FILE = "report.html"
INK, ACCENT, PALE = "#24292f", "#2f6f4f", "#c9d8cf"
COLUMNS = 3  # small pictures side by side


def render(room: str, content: dict[str, Any], **filters: Callable[..., str]) -> str:
    """The report of a room, by its own template, which fills in `page.html.jinja`."""
    loader = ChoiceLoader([PackageLoader(room, "."), PackageLoader("pipeline.reporting", ".")])
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    environment.filters |= filters
    return environment.get_template("report.html.jinja").render(content)


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


def in_legend(name: str) -> str:
    """A name for a legend: matplotlib leaves out those that begin with an underscore."""
    return f" {name}" if name.startswith("_") else name


@contextmanager
def literally(figure: Figure) -> Iterator[None]:
    """While it is saved, texts are what they say: names are users', and may have dollar signs."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with mpl.rc_context({"text.parse_math": False}):  # of those that are made as it is drawn
        yield


def to_svg(figure: Figure) -> str:
    """An <svg> element that can stand in a page beside others."""
    sink = io.StringIO()
    # Names inside one page must differ from figure to figure, yet the page must not change from run to run.
    with literally(figure), mpl.rc_context({"svg.hashsalt": "skipdecode", "svg.fonttype": "path"}):
        figure.savefig(sink, format="svg", metadata={"Date": None})
    text = sink.getvalue()
    return text[text.index("<svg") :]
