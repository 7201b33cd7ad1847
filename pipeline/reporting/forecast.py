"""What a run is expected to take and to cost, stored in its output, and compared with what it took."""

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

from pipeline.commits.commit import Totals
from pipeline.commits.flop_sums import FlopSums
from pipeline.errors import counted
from pipeline.storage.records import Amount, Count, Flops, Record
from pipeline.storage.storage import Storage

FORECAST_FILE = "_plan.json"


@dataclass(frozen=True, slots=True)
class Forecast(FlopSums):
    """Expected figures of a whole run. FLOPs as in the ledger; seconds are replica-seconds, summed over replicas."""

    run: str  # fingerprint, and if incremental also what is new
    rows: Count
    work_units: Count
    sampled_rows: Count
    error_share: Amount  # of sampled rows, that no prompt can be made of
    prompt_tokens: Count
    prompt_tokens_margin: Amount | None  # 95 % interval of the sample, as a share of prompt_tokens; None: not known
    output_tokens: Count
    output_source: str  # where the output lengths come from, in words
    flops_prompt: Flops
    flops_decode: Flops
    flops_decode_full_depth: Flops
    flops_full_depth: Flops  # prompt and decode
    seconds: Amount | None = None
    seconds_full_depth: Amount | None = None
    speed_source: str = "unknown"  # where the seconds come from, in words
    cost: Amount | None = None
    cost_full_depth: Amount | None = None
    audit_fraction: Amount = 0.0  # of the rows, that are generated at full depth too: on top of all this
    rows_per_prompt: Amount = 1.0  # that share its FLOPs, as samples of an input row do

    @property
    def decode_share(self) -> float:
        """Share of decoding in the FLOPs at full depth."""
        return self.flops_decode_full_depth / self.flops_full_depth if self.flops_full_depth else 0.0

    @property
    def flops_audit(self) -> int:
        """Of all audits: full depth's answers, and how likely both depths find these, and full depth the run's own.
        Prompts run twice at full depth, and once more where the schedule has its own way with them, for each sample.
        """
        prompt = self.flops_full_depth - self.flops_decode_full_depth
        own_prompt = self.flops_prompt if self.flops_prompt < prompt else 0
        prompts = self.rows_per_prompt * (2 * prompt + own_prompt)
        return round(self.audit_fraction * (prompts + 3 * self.flops_decode_full_depth + self.flops_decode))

    def facts(self) -> dict[str, str]:
        """For a table."""
        units = counted(self.work_units, "work unit")
        margin = "margin unknown" if self.prompt_tokens_margin is None else f"± {self.prompt_tokens_margin:.1%}"
        facts = {
            "rows": f"{self.rows:,} in {units}, {self.error_share:.1%} without a prompt",
            "prompt tokens": f"{self.prompt_tokens:,} ({margin}, from {self.sampled_rows:,} rows)",
            "output tokens": f"{self.output_tokens:,} ({self.output_source})",
            "FLOPs at full depth": f"{self.flops_full_depth / 1e12:.3f} T, {self.decode_share:.1%} of them in decoding",
            "FLOPs of this run": f"{self.flops / 1e12:.3f} T",
            "decode FLOP speed-up": f"{self.decode_speedup:.3f}x",
            "whole-job FLOP speed-up": f"{self.sample_speedup:.3f}x",
        }
        if self.seconds is not None and self.seconds_full_depth is not None:
            facts["replica-hours"] = (
                f"{self.seconds / 3600:.4f}, at full depth {self.seconds_full_depth / 3600:.4f} ({self.speed_source})"
            )
        else:
            facts["replica-hours"] = "not told: that takes a speed, which --plan-prompts measures on this machine"
        if self.cost is not None and self.cost_full_depth is not None:
            facts["cost"] = f"{self.cost:.4f}, at full depth {self.cost_full_depth:.4f}"
        if self.audit_fraction:
            facts["audits"] = (
                f"come on top, of {self.audit_fraction:.1%} of the rows: {self.flops_audit / 1e12:.3f} T FLOPs, "
                f"{self.flops_audit / max(1, self.flops):.1%} of this run's"
            )
        return facts


_RECORD: Record[Forecast] = Record(Forecast, "delete it, and make the plan again")


def write_forecast(storage: Storage, forecast: Forecast) -> None:
    names = ("flops", "decode_share", "decode_speedup", "sample_speedup")
    derived = {name: getattr(forecast, name) for name in names}
    content = {"format": 1, **asdict(forecast), **derived}
    storage.write(FORECAST_FILE, json.dumps(content, indent=1).encode())


def read_forecast(storage: Storage, run: str) -> Forecast | None:
    """The plan that was made for this run, None if there is none: a plan for other settings says nothing about it."""
    forecast = _RECORD.sound(storage, FORECAST_FILE)  # a report is no less worth for a damaged plan
    return forecast if forecast is not None and forecast.run == run else None


class Line(NamedTuple):
    """One figure, planned and actual."""

    name: str
    planned: str
    actual: str
    ratio: str


def against_actual(forecast: Forecast | None, totals: Totals) -> list[Line]:
    """Planned figures beside those of the finished run; none without a plan."""
    if forecast is None:
        return []
    figures: list[tuple[str, float | None, float]] = [
        ("rows", forecast.rows, totals.rows),
        ("prompt tokens", forecast.prompt_tokens, totals.prompt_tokens),
        ("output tokens", forecast.output_tokens, totals.generated_tokens),
        ("TFLOP", forecast.flops / 1e12, totals.flops / 1e12),
        ("TFLOP at full depth", forecast.flops_full_depth / 1e12, totals.flops_full_depth / 1e12),
        ("whole-job FLOP speed-up", forecast.sample_speedup, totals.sample_speedup),
        ("replica-seconds" + ", with audits in the actual" * (totals.audited > 0), forecast.seconds, totals.seconds),
    ]
    return [
        Line(name, _shown(planned), _shown(actual), f"{actual / planned:.3f}" if planned else "")
        for name, planned, actual in figures
        if planned is not None
    ]


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
