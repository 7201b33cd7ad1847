"""The job benchmark's tables for the terminal, and its charts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.reporting.page import ACCENT, INK, PALE, in_legend, literally

SEGMENTS = {  # of the seconds of a job, and their colours
    "prompts: arithmetic": ACCENT,
    "prompts: beyond it": PALE,
    "decoding: arithmetic": "#7a8794",
    "decoding: beyond it": "#cfd6dd",
    "not told apart": "#ececec",
}
Row = Mapping[str, Any]
Rows = Sequence[Row]


def speed_table(title: str, rows: Rows) -> Table:
    """Fits 80 columns."""
    caption = (
        f"x: times as fast as {rows[0]['name']}; floor: its FLOPs at the rate of packed matrix products, as share of "
        "its time; full: live rows in decode passes, as share of the rows that could be"
    )
    columns = {
        "rows/s": ("rows_per_s", ".2f"),
        "x": ("over_reference", ".2f"),
        "decode\nx": ("decode_over_reference", ".2f"),
        "prompts\ns": ("prompt_seconds", ".1f"),
        "decode\ns": ("decode_seconds", ".1f"),
        "tokens\nout": ("output_tokens", ",d"),
        "floor": ("share_of_floor", ".2f"),
        "full": ("occupancy", ".2f"),
    }
    return _filled(title, caption, columns, rows)


def quality_table(rows: Rows) -> Table:
    """What schedules save by the ledger and by the clock, and what everybody's answers are like. Fits 80 columns."""
    caption = (
        "FLOP x: saved on decode tokens, on whole samples, and from the same runner's full depth to this run; real x: "
        "the last by the clock; same: rows with the first contender's tokens; ROUGE-L: share of its own"
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
    return _filled("", caption, columns, rows)


def _filled(title: str, caption: str, columns: Mapping[str, tuple[str, str]], rows: Rows) -> Table:
    table = Table(
        title=title, title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD, padding=0
    )
    table.add_column("contender")
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [(row.get(key), form) for key, form in columns.values()]
        table.add_row(row["name"], *("" if value is None else format(value, form) for value, form in cells))
    return table


def write_chart(path: Path, title: str, rows: Rows) -> None:
    """A bar for each contender, fastest first: the seconds that arithmetic alone takes, and what goes beyond them.

    Below them the course of the keys' and values' memory, of those that tell it.
    """
    figure = Figure(figsize=(11, 5.2 + 0.55 * len(rows)), layout="constrained")
    axes, cache = figure.subplots(2, height_ratios=[1.7 + 0.55 * len(rows), 3.5])
    ordered = sorted(rows, key=lambda row: -row["seconds"])  # bars go upwards
    names, start = [row["name"] for row in ordered], [0.0] * len(ordered)
    segments = zip(*map(_segments, ordered), strict=True)
    for (label, colour), seconds in zip(SEGMENTS.items(), segments, strict=True):
        axes.barh(names, seconds, left=start, color=colour, label=label)
        start = [before + more for before, more in zip(start, seconds, strict=True)]
    for at, row in enumerate(ordered):
        label = f"{row['rows_per_s']:.2f} rows/s, floor {row['share_of_floor']:.0%}"
        axes.text(start[at], at, f"  {label}", va="center", color=INK)
    axes.set_xlim(0, 1.3 * max(start))
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    for row in rows:
        if row["cache_course"]:
            sizes = [size / 1e6 for size in row["cache_course"]]
            cache.plot(sizes, label=in_legend(row["name"]), drawstyle="steps-post")
    cache.set_xlabel("pass")
    cache.set_title("key/value cache, MB", loc="left", fontsize=11, color=INK)
    axes.legend(frameon=False, fontsize=9, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    if cache.lines:  # peers do not tell
        cache.legend(frameon=False, fontsize=9)
    for each in (axes, cache):
        each.spines[["top", "right"]].set_visible(False)
    with literally(figure):
        figure.savefig(path)


def _segments(row: Row) -> list[float]:
    """Seconds for each of `SEGMENTS`; together they are the whole job."""
    whole, prompts, decoding = row["seconds"], row["prompt_seconds"], row["decode_seconds"]
    # On a machine whose speed drifts a part can come out below its floor.
    least_prompts = min(row["floor_prompt_seconds"], whole if prompts is None else prompts)
    least_decoding = min(row["floor_decode_seconds"], whole - least_prompts if decoding is None else decoding)
    told = [least_prompts, (prompts or least_prompts) - least_prompts]
    told += [least_decoding, (decoding or least_decoding) - least_decoding]
    return [*told, max(0.0, whole - sum(told))]
