"""The quality guard: a sample of rows is generated at full depth too, and compared with what the schedule wrote."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from math import sqrt
from typing import Literal

import pyarrow as pa

from engine import Generation, Ledger, ModelShape, Sampling, Schedule
from pipeline.commits.commit import Totals
from pipeline.rows.row_generator import DeviceBroken, Generator, RowGenerator, is_device_broken
from pipeline.rows.rows import TOKENS

log = logging.getLogger(__name__)

# One-sided, in standard errors. The estimate is looked at after every unit, so a chance of 1 in 700 at each look is
# asked for instead of the usual 1 in 20.
CONFIDENCE = 3.0
FEWEST = 8  # audited rows before anything is concluded


def is_audited(row: str, fraction: float) -> bool:
    """Whether a row is in the sample: a hash of its place in the input decides, in every session and on every retry."""
    digest = hashlib.sha256(f"audit\0{row}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") < fraction * 2**48


class Auditor:
    """Compares a replica's outputs with full depth, on the same engine."""

    def __init__(
        self,
        engine: Generator,
        shape: ModelShape,
        sampling: Sampling,
        schedule: Schedule,
        batch_size: int | Literal["auto"],
        fraction: float,
    ) -> None:
        self._engine, self._schedule, self._ledger = engine, schedule, Ledger(shape, schedule)
        self._full_depth = RowGenerator(engine, sampling, None, batch_size)
        # Outputs at full depth are equal to themselves.
        self._fraction = 0.0 if schedule.is_full_depth else fraction

    def audit(self, prepared: pa.Table, ids: Sequence[str], output: pa.Table) -> dict[str, float]:
        """What a unit's audited rows add to `Totals`. Raises DeviceBroken; any other trouble leaves the unit unaudited.

        Args:
            prepared: with the rows' prompts.
            ids: of the rows.
            output: the rows' generations under the schedule.
        """
        if not self._fraction:
            return {}
        rows = [
            row
            for row, error in enumerate(output["error"].to_pylist())
            if error is None and is_audited(ids[row], self._fraction)
        ]
        if not rows:
            return {}
        texts = output["generation"].take(rows).to_pylist()
        try:
            return self._compare(prepared[TOKENS].take(rows).to_pylist(), [ids[row] for row in rows], texts)
        except DeviceBroken:
            raise
        except Exception as error:  # a second opinion must not cost the first
            if is_device_broken(error):
                raise DeviceBroken(str(error)) from error
            log.warning("%d rows could not be audited (%s: %s)", len(rows), type(error).__name__, error)
            return {}

    def _compare(self, prompts: list[list[int]], ids: Sequence[str], texts: list[str]) -> dict[str, float]:
        # Not at the top: the metrics take seconds to import, and read and commit tasks do without them.
        from pipeline.reporting.text_metrics import rouge_l

        answers = self._full_depth.generate(prompts, ids)
        pairs = [
            (prompt, answer, text)
            for prompt, answer, text in zip(prompts, answers, texts, strict=True)
            if isinstance(answer, Generation)
        ]
        rouge = [rouge_l(text, answer.text) for _, answer, text in pairs]
        (scores,) = self._engine.score(
            [prompt for prompt, _, _ in pairs], [answer.tokens for _, answer, _ in pairs], [self._schedule]
        )
        return {
            "audited": len(pairs),
            "audit_rouge": sum(rouge),
            "audit_rouge_squares": sum(value * value for value in rouge),
            "audit_agreeing": sum(sum(score.agrees) for score in scores),
            "audit_steps": sum(len(score.agrees) for score in scores),
            "flops_audit": sum(self._flops(answer) for _, answer, _ in pairs),
        }

    def _flops(self, answer: Generation) -> int:
        """Generating at full depth, then scoring: prompt and answer at full depth, and again under the schedule."""
        prompt, shared = answer.prompt_tokens, answer.shared_prefix_tokens
        both = [self._ledger.full_depth, self._ledger]
        # Prompts run once for both, unless the schedule has its own way with them.
        prompts = both if self._ledger.schedule.prompt_bridge else both[:1]
        scoring = sum(ledger.prompt_layers(prompt, shared) for ledger in prompts)
        scoring += sum(ledger.decode(prompt, answer.generated_tokens) for ledger in both)
        return answer.flops_full_depth + scoring


def audit_estimate(totals: Totals) -> str:
    """The audit so far, for people; '' before its first row."""
    if not totals.audited:
        return ""
    agreement = f", agreement {totals.audit_agreeing / totals.audit_steps:.3f}" if totals.audit_steps else ""
    return f"ROUGE-L to full depth {totals.audit_rouge / totals.audited:.3f}{agreement} ({totals.audited:,} rows)"


def fails_audit(totals: Totals, minimum: float | None) -> bool:
    """Whether mean ROUGE-L lies below the minimum, beyond what chance explains.

    A perfect row is counted in: a few equal rows would have no spread, and would be believed at once.
    """
    if minimum is None or totals.audited < FEWEST:
        return False
    count = totals.audited + 1
    mean = (totals.audit_rouge + 1) / count
    variance = max(0.0, (totals.audit_rouge_squares + 1) / count - mean**2)
    return mean + CONFIDENCE * sqrt(variance / count) < minimum


def say_failed_audit(totals: Totals, minimum: float, rows: int) -> str:
    """Why a job stops, and the ways on."""
    return (
        f"the schedule's outputs are too far from full depth: {audit_estimate(totals)}, less than min_audit_rouge "
        f"{minimum:g}, after {totals.rows:,} of {rows:,} rows; start the job again with a lower minimum to accept that "
        "and resume, or anew with a better schedule (see jobs/calibrate_schedule.py) and --fresh"
    )
