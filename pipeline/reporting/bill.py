"""The bill of a run: what its replicas' hours cost, against the same tokens at full depth."""

from __future__ import annotations

from pipeline.commits.commit import Totals
from pipeline.config import JobConfig

JOULES_PER_KWH = 3.6e6


def billed_hours(config: JobConfig, totals: Totals) -> float:
    """GPU-hours, without GPUs replica-hours, that replicas spent on committed units, their audits included: starting up
    and what was done twice come on top."""
    return totals.seconds / 3600 * config.billed_gpus


def hours_unit(config: JobConfig) -> str:
    """What `billed_hours` counts."""
    return "GPU-hours" if config.gpus_per_replica else "replica-hours"


def bill(config: JobConfig, totals: Totals) -> dict[str, str]:
    """Lines of the bill; without a price just the hours."""
    hours = billed_hours(config, totals)
    lines = {hours_unit(config): f"{hours:.4f}"}
    if totals.joules:
        per_million = totals.joules / JOULES_PER_KWH / max(1, totals.rows) * 1e6
        lines["energy"] = f"{totals.joules / JOULES_PER_KWH:.4f} kWh of the GPUs, {per_million:,.2f} per million rows"
        lines["energy at full depth"] = _at_full_depth(totals.joules / JOULES_PER_KWH, totals, " kWh")
    if config.price_per_gpu_hour is None:
        return lines
    money = hours * config.price_per_gpu_hour
    per_million = money / max(1, totals.rows) * 1e6
    lines["cost"] = f"{money:.4f} at {config.price_per_gpu_hour:g} an hour, {per_million:,.2f} per million rows"
    lines["cost at full depth"] = _at_full_depth(money, totals)
    return lines


def _at_full_depth(amount: float, totals: Totals, unit: str = "") -> str:
    """Nothing was measured at full depth: what is known of it is its FLOPs, and that it needs no audit."""
    spent = totals.flops + totals.flops_audit
    speedup = totals.flops_full_depth / spent if spent else 1.0
    return f"{amount * speedup:.4f}{unit}, if its FLOPs had cost as much each"
