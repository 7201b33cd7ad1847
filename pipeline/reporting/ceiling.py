"""Cost ceilings: what a job may spend, and what it says when that is spent."""

from __future__ import annotations

from pipeline.commits.commit import Totals
from pipeline.config import JobConfig
from pipeline.errors import JobStopped
from pipeline.reporting.bill import billed_hours, hours_unit


def reached_ceiling(config: JobConfig, totals: Totals) -> str:
    """What is spent of the first ceiling that is reached, in words; '' while none is."""
    if config.max_flops is not None and totals.flops_spent >= config.max_flops:
        return f"{totals.flops_spent:.4g} FLOPs of max_flops {config.max_flops:g}"
    hours = billed_hours(config, totals)
    if config.max_gpu_hours is not None and hours >= config.max_gpu_hours:
        return f"{hours:.4g} {hours_unit(config)} of max_gpu_hours {config.max_gpu_hours:g}"
    return ""


def check_ceiling(config: JobConfig, totals: Totals, rows: int) -> None:
    """Raises JobStopped if these totals of committed units, of a job over so many rows, have reached a ceiling."""
    spent = reached_ceiling(config, totals)
    if spent:
        way_on = "go on with as much again" if config.incremental else "resume it with a higher ceiling or without one"
        raise JobStopped(
            f"{spent} are spent, with {rows - totals.rows:,} of {rows:,} rows left: start the job again to {way_on}"
        )
