"""The benchmark's table for the terminal and its chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from pipeline.reporting.chart_style import ACCENT, INK, PALE

SHORT = {"transformers": "hf", "ctranslate2": "ct2"}
THEIRS = "#9aa5b1"


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Fits 80 columns."""
    baselines = list(rows[0]["decode_over"])
    found = Table(
        title=title,
        caption="tok/s: output tokens per second, with prompts and decoding alone; x: decoding over transformers (hf), "
        "CTranslate2 (ct2), full depth; share: real x / FLOP x; floor: the machine's least time / ours",
    )
    found.add_column("contender", no_wrap=True)
    over = [f"x\n{SHORT[name]}" for name in baselines]
    headings = ["all\ntok/s", "decode\ntok/s", *over, "FLOP\nx", "real\nx", "\nshare", "\nfloor"]
    for heading in headings:
        found.add_column(heading, justify="right")
    for row in rows:
        found.add_row(
            row["name"],
            f"{row['output_tokens_per_s']:.0f}",
            f"{row['decode_tokens_per_s']:.0f}",
            *(f"{row['decode_over'][name]:.2f}" for name in baselines),
            *(
                f"{row[key]:.2f}" if key in row else ""
                for key in ("decode_flop_speedup", "measured_speedup", "realised_share", "share_of_floor")
            ),
        )
    return found


def ablation_table(title: str, by_schedule: dict[str, dict[str, Any]]) -> Table:
    """A row for each optimisation: how many times as fast the engine is with it."""
    found = Table(title=title, caption="output tokens/s with it / without it, prompts included, and decoding alone")
    found.add_column("optimisation", no_wrap=True)
    for schedule in by_schedule:
        found.add_column(f"{schedule}\nall", justify="right")
        found.add_column(f"{schedule}\ndecode", justify="right")
    for name in next(iter(by_schedule.values()))["decode_over"]:
        ratios = [row[over][name] for row in by_schedule.values() for over in ("output_over", "decode_over")]
        found.add_row(name, *(f"{ratio:.2f}" for ratio in ratios))
    return found


def cache_line(name: str, course: Sequence[int]) -> str:
    return f"cache at {name}: {max(course) / 1e6:.0f} MB at most, {course[-1] / 1e6:.0f} MB at the end"


def write_chart(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """A row for each batch size: decode tokens/s with the machine's limit behind, and the cache over the steps."""
    figure = Figure(figsize=(11, 0.6 + 2.6 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 2, squeeze=False, width_ratios=[3, 2])
    for (axes, cache), result in zip(panels, results, strict=True):
        for name, course in result["cache_bytes"].items():
            cache.plot([size / 1e6 for size in course], label=name, drawstyle="steps-post")
        cache.set_title("key/value cache, MB", loc="left", fontsize=11, color=INK)
        cache.spines[["top", "right"]].set_visible(False)
        cache.set_ylim(0, 1.4 * max(map(max, result["cache_bytes"].values())) / 1e6)  # room for the legend
        rows = result["contenders"][::-1]
        names = [row["name"] for row in rows]
        rates = [row["decode_tokens_per_s"] for row in rows]
        limits = [row["decode_tokens_per_s"] / row.get("share_of_floor", float("inf")) for row in rows]
        axes.barh(names, limits, color=PALE, label="this machine's limit")
        bars = axes.barh(names, rates, color=[ACCENT if "measured_speedup" in row else THEIRS for row in rows])
        axes.bar_label(bars, [f"{rate:.0f}" for rate in rates], padding=4, color=INK)
        axes.set_title(f"batch {result['batch_size']}", loc="left", fontsize=11, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.1)
    panels[0, 0].legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    panels[0, 1].legend(frameon=False, fontsize=8, ncols=3, loc="upper right")
    panels[-1, 0].set_xlabel("output tokens/s while decoding")
    panels[-1, 1].set_xlabel("decode step")
    figure.savefig(path)
