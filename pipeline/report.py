"""report.html: what ran, lengths, throughput, FLOPs spent and saved, errors, samples. One file, no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import Environment, PackageLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engine import ModelShape, Schedule
from pipeline.audit import audit_estimate
from pipeline.bill import bill
from pipeline.chart_style import ACCENT, INK, PALE, to_svg
from pipeline.commit import Commit, Totals
from pipeline.config import JobConfig
from pipeline.forecast import Line
from pipeline.storage import Storage

REPORT_FILE = "report.html"
MAX_FILES = 20  # output files looked into for lengths and samples, spread over the run
SAMPLES = 12
ERRORS = 12


def write_report(
    storage: Storage,
    config: JobConfig,
    shape: ModelShape,
    schedule: Schedule,
    run: str,
    commits: Sequence[Commit],
    totals: Totals,
    planned: Sequence[Line] = (),
    stats: Sequence[str] = (),
) -> None:
    """Render and write the report of a finished run.

    Args:
        planned: compares it with the plan that was made for it.
        stats: what Ray Data says of each pass of this session.
    """
    stride = max(1, len(commits) // MAX_FILES)
    rows = _read_rows(storage, commits[::stride])
    kept = [name for name in rows.column_names if name not in ("generation", "error")][:1] if rows.num_rows else []
    label = config.id_column or (kept[0] if kept else None)
    generated = rows.filter(pa.compute.is_null(rows["error"])) if rows.num_rows else rows
    failed = rows.filter(pa.compute.is_valid(rows["error"])) if rows.num_rows else rows
    charts = [_flops_chart(totals), _schedule_chart(schedule)]
    if generated.num_rows:
        charts.insert(1, _lengths_chart(generated))
    environment = Environment(loader=PackageLoader("pipeline", "."), autoescape=True, trim_blocks=True)
    html = environment.get_template("report.html.jinja").render(
        run=run,
        shape=shape,
        totals=totals,
        config=config.model_dump(mode="json", exclude_none=True),
        facts=summary(totals, shape.layers) | bill(config, totals),
        planned=planned,
        stats=stats,
        charts=charts,
        label=label,
        samples=_pick(generated, SAMPLES),
        errors=_pick(failed, ERRORS),
    )
    storage.write(REPORT_FILE, html.encode())


def summary(totals: Totals, layers: int) -> dict[str, str]:
    """The run in a dozen lines, for the report and the terminal."""
    saved = totals.flops_full_depth - totals.flops
    good = totals.rows - totals.errors
    tokens_per_second = totals.generated_tokens / totals.seconds if totals.seconds else 0.0
    audit = audit_estimate(totals)
    audited = {"audit": f"{audit}, {totals.flops_audit / 1e12:.3f} T FLOPs beside all others"} if audit else {}
    return {
        "rows": f"{totals.rows:,} ({totals.errors:,} errors, {totals.truncated:,} prompts cut)",
        "prompt tokens": f"{totals.prompt_tokens:,} ({_per(totals.prompt_tokens, good)} per row)",
        "output tokens": f"{totals.generated_tokens:,} ({_per(totals.generated_tokens, good)} per row)",
        "ended by themselves": f"{totals.stopped / good:.1%} of rows" if good else "no rows",
        "output tokens/s": f"{tokens_per_second:.1f} per replica while generating",
        "mean active layers": f"{totals.mean_active_layers:.2f} of {layers}",
        "prompt FLOPs": f"{_flops(totals.flops_prompt, totals.prompt_speedup)}{_shared(totals)}",
        "decode FLOPs": _flops(totals.flops_decode, totals.decode_speedup),
        "whole-sample FLOPs": _flops(totals.flops, totals.sample_speedup),
        "FLOPs saved": f"{saved / 1e12:.3f} T ({saved / max(1, totals.flops_full_depth):.1%})",
        "padding": f"{totals.flops_padding / 1e12:.3f} T beside that, computed for nobody",
        **audited,
    }


def _flops(flops: int, speedup: float) -> str:
    return f"{flops / 1e12:.3f} T, {speedup:.3f}x less than full depth"


def _shared(totals: Totals) -> str:
    beside = f"{totals.flops_prefix / 1e12:.3f} T beside that"
    return f"; what all prompts begin with, once per replica: {beside}" if totals.flops_prefix else ""


def _per(total: int, rows: int) -> str:
    return f"{total / rows:.1f}" if rows else "0"


def _read_rows(storage: Storage, commits: Sequence[Commit]) -> pa.Table:
    tables = []
    for commit in commits:
        with storage.open(commit.file) as stream:
            tables.append(pq.read_table(stream))
    return pa.concat_tables(tables) if tables else pa.table({"error": pa.nulls(0, pa.string())})


def _pick(rows: pa.Table, count: int) -> list[dict[str, Any]]:
    """Rows spread evenly over the table."""
    indices = np.unique(np.linspace(0, rows.num_rows - 1, min(count, rows.num_rows)).astype(int))
    return list(rows.take(pa.array(indices, pa.int64())).to_pylist()) if rows.num_rows else []


def _flops_chart(totals: Totals) -> str:
    """Two bars: full depth and this run, each prompt + decode."""
    figure, axes = _figure("FLOPs by phase", 1.9)
    full_decode = totals.flops_decode_full_depth
    names, decodes = ["this run", "full depth"], [totals.flops_decode / 1e12, full_decode / 1e12]
    prompts = [totals.flops_prompt / 1e12, (totals.flops_full_depth - full_decode) / 1e12]
    axes.barh(names, prompts, color=PALE, label="prompt")
    bars = axes.barh(names, decodes, left=prompts, color=ACCENT, label="decode")
    sums = [prompt + decode for prompt, decode in zip(prompts, decodes, strict=True)]
    axes.bar_label(bars, [f"{whole:.2f}" for whole in sums], padding=4, color=INK)
    axes.margins(x=0.12)
    axes.set_xlabel("TFLOP")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    return to_svg(figure)


def _lengths_chart(rows: pa.Table) -> str:
    figure, axes = _figure("Lengths", 2.6)
    for name, color in (("prompt_tokens", PALE), ("generated_tokens", ACCENT)):
        axes.hist(rows[name].to_numpy(), bins=30, color=color, alpha=0.9, label=name.replace("_", " "))
    axes.set_xlabel("tokens")
    axes.set_ylabel("rows looked at")
    axes.legend(frameon=False)
    return to_svg(figure)


def _schedule_chart(schedule: Schedule) -> str:
    """Steps x layers: dark where both units run, pale where one does, white where the layer is skipped."""
    steps = max(2, schedule.plateaus[-1].first_step * 4 // 3 + 1)
    grid = np.zeros((schedule.layers, steps))
    for step in range(steps):
        for unit in schedule.active(step):
            grid[unit.layer, step] += 0.5
    figure, axes = _figure("Schedule: which layers run at which step", 3.2)
    colors = mpl.colors.LinearSegmentedColormap.from_list("units", ["#ffffff", PALE, ACCENT])
    extent = (0, steps, -0.5, schedule.layers - 0.5)
    axes.imshow(grid, origin="lower", aspect="auto", cmap=colors, vmin=0, vmax=1, extent=extent, interpolation="none")
    axes.set_xlabel("decode step")
    if not schedule.plateaus[-1].first_step:
        axes.set_xlabel("every decode step")
        axes.set_xticks([])
    axes.set_ylabel("layer")
    return to_svg(figure)


def _figure(title: str, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
