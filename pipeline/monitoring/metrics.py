"""What a run tells Prometheus through Ray: counts at commit, so that they are the ledger's, and replicas at work.

Ray exports each metric as `ray_<name>` on every node's metrics port. Counters are those of one session of a run; what
earlier sessions committed stands in `skipdecode_committed_rows` alone. Of an incremental run, the gauges of planned and
committed rows are about what is new.
"""

import os
from dataclasses import dataclass
from typing import Any

from ray.util.metrics import Counter, Gauge

from engine import BatchStats
from pipeline.commits.commit import Commit, Totals

RUN, REPLICA = "run", "replica"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name, which ends in `_total` if it is a counter, and its meaning."""

    name: str
    description: str
    tags: tuple[str, ...] = (RUN,)


# Counters of the driver: field of a commit's totals -> metric.
COUNTED = {
    "rows": Metric("skipdecode_rows_total", "rows committed, those with errors included"),
    "errors": Metric("skipdecode_error_rows_total", "rows committed with an error instead of a text"),
    "truncated": Metric("skipdecode_truncated_rows_total", "rows whose prompt was cut to fit"),
    "prompt_tokens": Metric("skipdecode_prompt_tokens_total", "prompt tokens of committed rows"),
    "generated_tokens": Metric("skipdecode_output_tokens_total", "output tokens of committed rows"),
    "flops_prompt": Metric("skipdecode_flops_prompt_total", "FLOPs of committed rows' prompts"),
    "flops_decode": Metric("skipdecode_flops_decode_total", "FLOPs of committed rows' decoding"),
    "flops_decode_full_depth": Metric("skipdecode_flops_decode_full_depth_total", "FLOPs of decoding at full depth"),
    "flops_full_depth": Metric("skipdecode_flops_full_depth_total", "FLOPs of prompts and decoding at full depth"),
    "flops_prefix": Metric("skipdecode_flops_prefix_total", "FLOPs of what all prompts begin with"),
    "flops_padding": Metric("skipdecode_flops_padding_total", "FLOPs computed for nobody"),
    "flops_audit": Metric("skipdecode_flops_audit_total", "FLOPs of audits, beside all others"),
    "audited": Metric("skipdecode_audited_rows_total", "rows generated at full depth too"),
    "joules": Metric("skipdecode_joules_total", "joules of GPUs while they did committed units"),
    "seconds": Metric("skipdecode_unit_seconds_total", "replica-seconds of committed units"),
    "gpu_seconds": Metric("skipdecode_gpu_seconds_total", "GPU-seconds of committed units"),
}
PLANNED = Metric("skipdecode_planned_rows", "rows of the whole run")
COMMITTED = Metric("skipdecode_committed_rows", "rows committed by all sessions of the run")
AUDIT_ROUGE = Metric("skipdecode_audit_rouge", "mean ROUGE-L of audited rows to full depth")
FAILURES = Metric("skipdecode_unit_failures_total", "attempts at work units that failed and may be repeated")
BATCH_FILL = Metric("skipdecode_batch_fill", "share of the seats that had a row", (RUN, REPLICA))
CACHE_BYTES = Metric("skipdecode_cache_bytes", "most memory of a batch's key/value cache", (RUN, REPLICA))
PREEMPTIONS = Metric("skipdecode_preemptions_total", "rows begun anew for want of cache", (RUN, REPLICA))
BUSY = Metric("skipdecode_busy_seconds_total", "seconds a replica spent computing batches", (RUN, REPLICA))

ALL = (*COUNTED.values(), PLANNED, COMMITTED, AUDIT_ROUGE, FAILURES, BATCH_FILL, CACHE_BYTES, PREEMPTIONS, BUSY)


class RunMeter:
    """The driver's metrics of one run."""

    def __init__(self, run: str, planned_rows: int, committed_rows: int) -> None:
        tags = {RUN: run}
        self._counters = {field: _made(metric, tags) for field, metric in COUNTED.items()}
        self._committed, self._rouge = _made(COMMITTED, tags), _made(AUDIT_ROUGE, tags)
        self._failures = _made(FAILURES, tags)
        self._gauges: dict[Any, float] = {_made(PLANNED, tags): planned_rows, self._committed: committed_rows}
        self.repeat()

    def repeat(self) -> None:
        """Tell the gauges as they stand: Ray drops one that is not set again within two of its reports, 20 s."""
        for gauge, value in self._gauges.items():
            gauge.set(value)

    def committed(self, commit: Commit, totals: Totals) -> None:
        """A unit is committed; `totals` are those of the run so far, over all its sessions."""
        for field, counter in self._counters.items():
            amount = getattr(commit.totals, field)
            if amount > 0:
                counter.inc(amount)
        self._gauges[self._committed] = totals.rows
        if totals.audited:
            self._gauges[self._rouge] = totals.audit_rouge / totals.audited
        self.repeat()

    def failed(self) -> None:
        """An attempt at a unit has failed."""
        self._failures.inc()


class ReplicaMeter:
    """A replica's metrics."""

    def __init__(self, run: str) -> None:
        tags = {RUN: run, REPLICA: str(os.getpid())}  # Ray adds the node
        made = (_made(metric, tags) for metric in (BATCH_FILL, CACHE_BYTES, PREEMPTIONS, BUSY))
        self._fill, self._cache, self._preemptions, self._busy = made

    def batch_done(self, stats: BatchStats) -> None:
        self._fill.set(stats.occupancy)
        self._cache.set(stats.cache_bytes)
        if stats.preemptions:
            self._preemptions.inc(stats.preemptions)
        seconds = stats.prefill_seconds + stats.decode_seconds
        if seconds > 0:
            self._busy.inc(seconds)


def _made(metric: Metric, tags: dict[str, str]) -> Any:
    kind = Counter if metric.name.endswith("_total") else Gauge
    made = kind(metric.name, metric.description, metric.tags)
    made.set_default_tags(tags)
    return made
