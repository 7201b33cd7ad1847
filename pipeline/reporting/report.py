"""report.html: what ran, lengths, throughput, FLOPs spent and saved, errors, samples. One file, no network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, PackageLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engine import Schedule
from pipeline.commits.commit import Commit, Totals
from pipeline.config import JobConfig
from pipeline.redaction import redacted
from pipeline.reporting.audit import audit_estimate, audit_facts
from pipeline.reporting.bill import bill
from pipeline.reporting.chart_style import ACCENT, INK, PALE, to_svg
from pipeline.reporting.forecast import Line
from pipeline.rows.rows import GENERATED
from pipeline.storage.records import LARGE
from pipeline.storage.storage import Storage
from pipeline.storage.stores import Unfit
from pipeline.values.row_groups import open_parquet, read_batches
from pipeline.values.show import shown

REPORT_FILE = "report.html"
MAX_FILES = 20  # output files looked into for lengths and samples, spread over the run
SAMPLES = 12
ERRORS = 12
LONGEST = {"generation": 5_000, "label": 500, "error": 2_000}  # characters shown


def write_report(
    storage: Storage,
    config: JobConfig,
    schedule: Schedule,
    run: str,
    commits: Sequence[Commit],
    totals: Totals,
    planned: Sequence[Line],
    stats: Sequence[str],
) -> None:
    """Render and write the report of a finished run.

    Args:
        planned: compares it with the plan that was made for it.
        stats: what Ray Data says of each pass of this session.
    """
    stride = max(1, len(commits) // MAX_FILES)
    label, looked = None, _Looked()
    for commit in commits[::stride]:
        label = _look_into(storage, commit, config.id_column, looked)
    charts = [_flops_chart(totals), _schedule_chart(schedule, config.max_new_tokens)]
    if looked.prompt_tokens:
        charts.insert(1, _lengths_chart(looked))
    shown_config = config.model_dump(mode="json", exclude_none=True)
    environment = Environment(loader=PackageLoader("pipeline.reporting", "."), autoescape=True, trim_blocks=True)
    html = environment.get_template("report.html.jinja").render(
        run=run,
        totals=totals,
        config={name: redacted(str(value)) for name, value in shown_config.items()},
        facts=summary(totals, schedule.layers) | bill(config, totals),
        audit=audit_facts([commit.totals for commit in commits]),
        planned=planned,
        stats=stats,
        charts=charts,
        label=label,
        samples=_spread(looked.samples, SAMPLES),
        errors=_spread(looked.errors, ERRORS),
        subject=_subject(commits),
    )
    storage.write(REPORT_FILE, html.encode(errors="backslashreplace"))


def is_reported(storage: Storage, commits: Iterable[Commit]) -> bool:
    """Whether the report of just these commits is there."""
    try:
        return _subject(commits).encode() in (storage.read(REPORT_FILE, LARGE) or b"")
    except Unfit:
        return False


def _subject(commits: Iterable[Commit]) -> str:
    """Names what a report is of."""
    return hashlib.sha256("\n".join(sorted(commit.file for commit in commits)).encode()).hexdigest()


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
        "output tokens/s": f"{tokens_per_second:.1f} per replica while generating{' and auditing' if audit else ''}",
        "mean active layers": f"{totals.mean_active_layers:.2f} of {layers}",
        "FLOPs saved": f"{saved / 1e12:.3f} T ({saved / max(1, totals.flops_full_depth):.1%})",
        "whole-sample FLOPs": _flops(totals.flops, totals.sample_speedup),
        "prompt FLOPs": f"{_flops(totals.flops_prompt, totals.prompt_speedup)}{_shared(totals)}",
        "decode FLOPs": _flops(totals.flops_decode, totals.decode_speedup),
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


@dataclass
class _Looked:
    """What was found in some of the output: samples and errors as text, by column, and the lengths of good rows."""

    samples: list[dict[str, str]] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)


def _look_into(storage: Storage, commit: Commit, label: str | None, looked: _Looked) -> str | None:
    """Add what a unit has to show. Returns the column that names its rows: `label`, else the first that was kept.

    Never holds more than a batch of rows, whatever their size.
    """
    failed = commit.totals.errors
    wanted = {False: _places(commit.totals.rows - failed, SAMPLES), True: _places(failed, ERRORS)}
    met = {False: 0, True: 0}
    with storage.open(commit.file) as stream:
        file = open_parquet(stream)
        kept = [name for name in file.schema_arrow.names if name not in GENERATED.names]
        label = label if label in kept else next(iter(kept), None)
        names = ["generation", "finish_reason", "prompt_tokens", "generated_tokens", "error"]
        for batch in read_batches(file, names if label is None else [label, *names]):
            columns = {name: batch.column(name) for name in names}
            if label is not None:
                columns["label"] = batch.column(label)
            good = columns["error"].is_null()
            for name, lengths in (("prompt_tokens", looked.prompt_tokens),
                                  ("generated_tokens", looked.generated_tokens)):  # fmt: skip
                lengths += columns[name].filter(good).to_pylist()
            for row, is_good in enumerate(good.to_pylist()):
                if met[not is_good] in wanted[not is_good]:
                    values = {name: shown(column[row], LONGEST.get(name, 50)) for name, column in columns.items()}
                    (looked.samples if is_good else looked.errors).append(values)
                met[not is_good] += 1
    return label


def _places(rows: int, count: int) -> set[int]:
    """Of so many, spread evenly over all."""
    return {int(place) for place in np.linspace(0, rows - 1, min(count, rows))} if rows else set()


def _spread(rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    return [rows[place] for place in sorted(_places(len(rows), count))]


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


def _lengths_chart(looked: _Looked) -> str:
    figure, axes = _figure("Lengths", 2.6)
    for name, lengths, color in (
        ("prompt tokens", looked.prompt_tokens, PALE),
        ("generated tokens", looked.generated_tokens, ACCENT),
    ):
        axes.hist(lengths, bins=30, color=color, alpha=0.9, label=name)
    axes.set_xlabel("tokens")
    axes.set_ylabel("rows looked at")
    axes.legend(frameon=False)
    return to_svg(figure)


def _schedule_chart(schedule: Schedule, longest: int) -> str:
    """Steps x layers: dark where both units run, pale where one does, white where the layer is skipped."""
    steps = max(2, min(longest, schedule.plateaus[-1].first_step * 4 // 3 + 1))
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
