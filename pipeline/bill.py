"""The bill of a run: what its replicas' hours cost, against the same tokens at full depth."""

from __future__ import annotations

from pipeline.commit import Totals
from pipeline.config import JobConfig


def billed_hours(config: JobConfig, totals: Totals) -> float:
    """GPU-hours, without GPUs replica-hours, that replicas spent on committed units: starting up and what was done
    twice come on top."""
    return totals.seconds / 3600 * config.billed_gpus


def hours_unit(config: JobConfig) -> str:
    """What `billed_hours` counts."""
    return "GPU-hours" if config.gpus_per_replica else "replica-hours"


def bill(config: JobConfig, totals: Totals) -> dict[str, str]:
    """Lines of the bill; without a price just the hours."""
    hours = billed_hours(config, totals)
    lines = {hours_unit(config): f"{hours:.4f}"}
    if config.price_per_gpu_hour is None:
        return lines
    money = hours * config.price_per_gpu_hour
    per_million = money / max(1, totals.rows) * 1e6
    lines["cost"] = f"{money:.4f} at {config.price_per_gpu_hour:g} an hour, {per_million:,.2f} per million rows"
    # Nothing was timed at full depth: what is known of it is its FLOPs.
    lines["cost at full depth"] = f"{money * totals.sample_speedup:.4f}, if its FLOPs had taken as long each"
    return lines
