"""report.html of a run: what ran, lengths, throughput, FLOPs spent and saved, errors, samples."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
from matplotlib.ticker import MaxNLocator

from engine import Schedule
from pipeline.commits.commit import Commit, Totals
from pipeline.commits.failed import FailedUnit, failed_rows
from pipeline.config import JobConfig
from pipeline.redaction import redacted
from pipeline.reporting.audit import audit_estimate, audit_facts
from pipeline.reporting.bill import bill
from pipeline.reporting.forecast import Line
from pipeline.reporting.page import ACCENT, INK, PALE, REPORT_FILE, head, panels, render, to_svg
from pipeline.reporting.schedule_maps import schedule_maps
from pipeline.rows.rows import GENERATED
from pipeline.storage.records import LARGE
from pipeline.storage.storage import Storage
from pipeline.storage.stores import Unfit
from pipeline.values.row_groups import open_parquet, read_batches
from pipeline.values.show import shown

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
    failed: Sequence[FailedUnit],
) -> None:
    """The report of a run that has come to its end, with units that failed or without; `stats` is what Ray Data says of
    each pass of this session.
    """
    looked = _Looked(config.id_column)
    for commit in commits[:: max(1, math.ceil(len(commits) / MAX_FILES))]:
        looked.into(storage, commit)
    schedules = schedule_maps([("which layers run at which step", schedule)], config.max_new_tokens)
    charts = [_flops_chart(totals), schedules]
    if looked.lengths["prompt_tokens"]:
        charts.insert(1, _lengths_chart(looked.lengths))
    shown_config = config.model_dump(mode="json", exclude_none=True)
    content = {
        "run": run,
        "totals": totals,
        "config": {name: redacted(str(value)) for name, value in shown_config.items()},
        "failed": failed_rows(failed) if failed else "",
        "facts": summary(totals, schedule.layers) | bill(config.price_per_gpu_hour, totals),
        "audit": audit_facts([commit.totals for commit in commits]),
        "planned": planned,
        "stats": stats,
        "charts": charts,
        "label": looked.label,
        "samples": _spread(looked.rows[True], SAMPLES),
        "errors": _spread(looked.rows[False], ERRORS),
        "subject": _subject(commits, config, failed),
    }
    storage.write(REPORT_FILE, render("pipeline.reporting", content).encode(errors="backslashreplace"))


def is_reported(storage: Storage, commits: Iterable[Commit], config: JobConfig) -> bool:
    """Whether the report of just these commits, at this price, and of none that failed, is there."""
    try:
        return _subject(commits, config, ()).encode() in (storage.read(REPORT_FILE, LARGE) or b"")
    except Unfit:
        return False


def _subject(commits: Iterable[Commit], config: JobConfig, failed: Iterable[FailedUnit]) -> str:
    """Names what a report is of."""
    of = [
        *sorted(commit.file for commit in commits),
        f"at {config.price_per_gpu_hour}",
        *(unit.unit for unit in failed),
    ]
    return hashlib.sha256("\n".join(of).encode()).hexdigest()


def summary(totals: Totals, layers: int) -> dict[str, str]:
    """The run in a dozen lines, for the report and the terminal."""
    saved = totals.flops_full_depth - totals.flops
    good = totals.rows - totals.errors
    tokens_per_second = totals.generated_tokens / totals.seconds if totals.seconds else 0.0
    audit = audit_estimate(totals)
    beside = f"{totals.flops_audit / 1e12:.3f} T FLOPs beside all others, {totals.audited_speedup:.3f}x with them"
    audited = {"audit": f"{audit}; {beside}"} if audit else {}
    row = "row with a text" if totals.errors else "row"
    prefix = f"; what all prompts begin with, once per replica: {totals.flops_prefix / 1e12:.3f} T beside that"
    return {
        "rows": f"{totals.rows:,} ({totals.errors:,} errors, {totals.truncated:,} prompts cut)",
        "prompt tokens": f"{totals.prompt_tokens:,} ({totals.prompt_tokens / max(1, good):.1f} per {row})",
        "output tokens": f"{totals.generated_tokens:,} ({totals.generated_tokens / max(1, good):.1f} per {row})",
        "ended by themselves": f"{totals.stopped / good:.1%} of {row.replace('row', 'rows')}" if good else "no rows",
        "output tokens/s": f"{tokens_per_second:.1f} per replica while generating{' and auditing' if audit else ''}",
        "mean active layers": f"{totals.mean_active_layers:.2f} of {layers}",
        "FLOPs saved": f"{saved / 1e12:.3f} T ({saved / max(1, totals.flops_full_depth):.1%})",
        "whole-sample FLOPs": _flops(totals.flops, totals.sample_speedup),
        "prompt FLOPs": f"{_flops(totals.flops_prompt, totals.prompt_speedup)}{prefix if totals.flops_prefix else ''}",
        "decode FLOPs": _flops(totals.flops_decode, totals.decode_speedup),
        "padding": f"{totals.flops_padding / 1e12:.3f} T beside that, computed for nobody",
        **audited,
    }


def _flops(flops: int, speedup: float) -> str:
    return f"{flops / 1e12:.3f} T, {speedup:.3f}x less than full depth"


class _Looked:
    """What was found in some of the output: samples and errors as text, and the lengths of good rows."""

    def __init__(self, label: str | None) -> None:
        self.label = label  # the column that names rows; where it is not kept, the first that is
        self.rows: dict[bool, list[dict[str, str]]] = {True: [], False: []}  # by whether they are good
        self.lengths: dict[str, list[int]] = {"prompt_tokens": [], "generated_tokens": []}

    def into(self, storage: Storage, commit: Commit) -> None:
        """Add what a unit has to show. Never holds more than a batch of rows, whatever their size."""
        failed = commit.totals.errors
        wanted = {True: _places(commit.totals.rows - failed, SAMPLES), False: _places(failed, ERRORS)}
        met = {True: 0, False: 0}
        with storage.open(commit.file) as stream:
            file = open_parquet(stream)
            kept = [name for name in file.schema_arrow.names if name not in GENERATED.names]
            self.label = self.label if self.label in kept else next(iter(kept), None)
            names = ["generation", "finish_reason", "prompt_tokens", "generated_tokens", "error"]
            for batch in read_batches(file, names if self.label is None else [self.label, *names]):
                columns = {name: batch.column(name) for name in names}
                if self.label is not None:
                    columns["label"] = batch.column(self.label)
                good = columns["error"].is_null()
                for name, lengths in self.lengths.items():
                    lengths += columns[name].filter(good).to_pylist()
                for row, is_good in enumerate(good.to_pylist()):
                    if met[is_good] in wanted[is_good]:
                        values = {name: shown(column[row], LONGEST.get(name, 50)) for name, column in columns.items()}
                        self.rows[is_good].append(values)
                    met[is_good] += 1


def _places(rows: int, count: int) -> set[int]:
    """Of so many, spread evenly over all."""
    return set(np.linspace(0, rows - 1, min(count, rows)).astype(int).tolist())


def _spread(rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    return [rows[place] for place in sorted(_places(len(rows), count))]


def _flops_chart(totals: Totals) -> str:
    """Two bars: full depth and this run, each prompt + decode."""
    figure, (axes,) = panels(1, 1.9)
    head(axes, "FLOPs by phase")
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


def _lengths_chart(lengths: Mapping[str, Sequence[int]]) -> str:
    figure, (axes,) = panels(1, 2.6)
    head(axes, "Lengths")
    edges = np.histogram_bin_edges([*chain.from_iterable(lengths.values())], bins=30).tolist()
    for (name, values), color in zip(lengths.items(), (PALE, ACCENT), strict=True):
        axes.hist(values, bins=edges, color=color, alpha=0.9, label=name.replace("_", " "))
    axes.set_xlabel("tokens")
    axes.set_ylabel("rows looked at")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return to_svg(figure)
