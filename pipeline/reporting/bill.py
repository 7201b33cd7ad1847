"""The bill of a run: what its replicas' hours cost, against the same tokens at full depth; and what it may spend."""

from pipeline.commits.commit import Totals
from pipeline.config import JobConfig
from pipeline.errors import JobStopped

JOULES_PER_KWH = 3.6e6


def _hours(totals: Totals) -> tuple[float, str]:
    """GPU-hours, without GPUs replica-hours, that replicas spent on committed units, their audits included; and which
    they are. Starting up, waiting, at the end above all, and what was done twice come on top.
    """
    hours = (totals.gpu_seconds + totals.gpuless_seconds) / 3600
    return hours, "GPU-hours" if totals.gpu_seconds else "replica-hours"


def bill(price_per_gpu_hour: float | None, totals: Totals) -> dict[str, str]:
    """Lines of the bill; without a price just the hours."""
    hours, unit = _hours(totals)
    lines = {unit: f"{hours:.4f}"}
    speedup = totals.audited_speedup  # nothing was measured at full depth: what is known of it is its FLOPs
    millions = max(1, totals.rows) / 1e6
    if totals.joules:
        energy = totals.joules / JOULES_PER_KWH
        lines["energy"] = f"{energy:.4f} kWh of the GPUs, {energy / millions:,.2f} per million rows"
        lines["energy at full depth"] = f"{energy * speedup:.4f} kWh, if its FLOPs had cost as much each"
    if price_per_gpu_hour is not None:
        money = hours * price_per_gpu_hour
        lines["cost"] = f"{money:.4f} at {price_per_gpu_hour:g} an hour, {money / millions:,.2f} per million rows"
        lines["cost at full depth"] = f"{money * speedup:.4f}, if its FLOPs had cost as much each"
    return lines


def reached_ceiling(config: JobConfig, totals: Totals) -> str:
    """What is spent of the first ceiling that is reached, in words; '' while none is."""
    if config.max_flops is not None and totals.flops_spent >= config.max_flops:
        return f"{totals.flops_spent:.4g} FLOPs of max_flops {config.max_flops:g}"
    hours, unit = _hours(totals)
    if config.max_gpu_hours is not None and hours >= config.max_gpu_hours:
        return f"{hours:.4g} {unit} of max_gpu_hours {config.max_gpu_hours:g}"
    return ""


def check_ceiling(config: JobConfig, totals: Totals, rows: int) -> None:
    """Raises JobStopped if these totals of committed units, of a job over so many rows, have reached a ceiling."""
    if spent := reached_ceiling(config, totals):
        way_on = "go on with as much again" if config.incremental else "resume it with a higher ceiling or without one"
        raise JobStopped(
            f"{spent} are spent, with {rows - totals.rows:,} of {rows:,} rows left: start the job again to {way_on}"
        )
