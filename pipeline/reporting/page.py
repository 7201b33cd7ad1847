"""Reports as pages: one file, no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader

REPORT_FILE = "report.html"


def render(room: str, content: dict[str, Any], **filters: Callable[..., str]) -> str:
    """The report of a room, by its own template, which fills in `page.html.jinja`."""
    loader = ChoiceLoader([PackageLoader(room, "."), PackageLoader("pipeline.reporting", ".")])
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    environment.filters |= filters
    return environment.get_template("report.html.jinja").render(content)
