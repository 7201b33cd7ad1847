"""The job benchmark's tables for the terminal, and its chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from pipeline.reporting.chart_style import ACCENT, INK, PALE

THEIRS, PALE_THEIRS, REST = "#7a8794", "#cfd6dd", "#ececec"
Rows = Sequence[Mapping[str, Any]]


def speed_table(title: str, rows: Rows) -> Table:
    """Fits 80 columns."""
    found = Table(
        title=title,
        title_justify="left",
        caption=f"x: times as fast as {rows[0]['name']}; floor: its FLOPs at the rate of packed matrix products, as "
        "share of its time; full: live rows in decode passes, as share of the rows that could be",
        caption_justify="left",
    )
    columns = {
        "rows/s": ("rows_per_s", ".2f"),
        "x": ("over_reference", ".2f"),
        "prompts\ns": ("prompt_seconds", ".1f"),
        "decode\ns": ("decode_seconds", ".1f"),
        "tokens\nout": ("output_tokens", ",d"),
        "floor": ("share_of_floor", ".2f"),
        "full": ("occupancy", ".2f"),
    }
    return _filled(found, columns, rows)


def quality_table(rows: Rows) -> Table:
    """What schedules save by the ledger and by the clock, and what everybody's answers are like. Fits 80 columns."""
    found = Table(
        caption="FLOP x: saved on decode tokens, on whole samples, and from the same runner's full depth to this run; "
        "real x: the last by the clock; same: rows with the first contender's tokens; ROUGE-L: share of its own",
        caption_justify="left",
    )
    columns = {
        "decode\nFLOP x": ("decode_flop_x", ".2f"),
        "sample\nFLOP x": ("sample_flop_x", ".2f"),
        "runs\nFLOP x": ("job_flop_x", ".2f"),
        "real\nx": ("measured_x", ".2f"),
        "\nshare": ("realised_share", ".2f"),
        "\nsame": ("same_rows", ".2f"),
        "ROUGE\n-L": ("rouge_l_share", ".2f"),
    }
    return _filled(found, columns, rows)


def _filled(table: Table, columns: Mapping[str, tuple[str, str]], rows: Rows) -> Table:
    table.add_column("contender")
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [(row.get(key), form) for key, form in columns.values()]
        table.add_row(row["name"], *("" if value is None else format(value, form) for value, form in cells))
    return table


def write_chart(path: Path, title: str, rows: Rows) -> None:
    """A bar for each contender, fastest first: the seconds that arithmetic alone takes, and what goes beyond them."""
    figure = Figure(figsize=(11, 1.7 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    ordered = sorted(rows, key=lambda row: -row["seconds"])  # bars go upwards
    start = [0.0] * len(ordered)
    for label, colour, seconds in _segments(ordered):
        axes.barh([row["name"] for row in ordered], seconds, left=start, color=colour, label=label)
        start = [before + more for before, more in zip(start, seconds, strict=True)]
    for at, row in enumerate(ordered):
        label = f"{row['rows_per_s']:.2f} rows/s, floor {row['share_of_floor']:.0%}"
        axes.text(start[at], at, f"  {label}", va="center", color=INK)
    axes.set_xlim(0, 1.3 * max(start))
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=5, loc="outside lower center", fontsize=9)
    figure.savefig(path)


def _segments(rows: Rows) -> list[tuple[str, str, list[float]]]:
    """(label, colour, seconds of each contender); together they are the whole job."""
    floors = [(row["floor_prompt_seconds"], row["floor_decode_seconds"]) for row in rows]
    told = [row["prompt_seconds"] is not None for row in rows]
    # On a machine whose speed drifts a part can come out below its floor.
    prompts = [min(floor[0], row["prompt_seconds"] or row["seconds"]) for row, floor in zip(rows, floors, strict=True)]
    decoding = [
        min(floor[1], row["decode_seconds"] if tells else max(0.0, row["seconds"] - prompt))
        for row, floor, tells, prompt in zip(rows, floors, told, prompts, strict=True)
    ]
    more_prompts = [row["prompt_seconds"] - p if t else 0.0 for row, p, t in zip(rows, prompts, told, strict=True)]
    more_decoding = [row["decode_seconds"] - d if t else 0.0 for row, d, t in zip(rows, decoding, told, strict=True)]
    parts = zip(rows, prompts, decoding, more_prompts, more_decoding, strict=True)
    rest = [max(0.0, row["seconds"] - sum(known)) for row, *known in parts]
    return [
        ("prompts: arithmetic", ACCENT, prompts),
        ("prompts: beyond it", PALE, more_prompts),
        ("decoding: arithmetic", THEIRS, decoding),
        ("decoding: beyond it", PALE_THEIRS, more_decoding),
        ("not told apart", REST, rest),
    ]
