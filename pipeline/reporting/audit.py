"""The quality guard: a sample of rows is generated at full depth too, and compared with what the schedule wrote."""

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa

from engine import BatchStats, Generation, Ledger, ModelShape, Sampling, Schedule, Tokenizer, sample_name
from engine.bootstrap import Bootstrap, Estimate
from pipeline.commits.commit import Totals
from pipeline.config import JobConfig
from pipeline.rows.row_generator import DeviceBroken, Generator, RowGenerator, is_device_broken
from pipeline.rows.rows import TOKENS

log = logging.getLogger(__name__)

# One-sided, in standard errors. The estimate is looked at after every unit, so a chance of 1 in 700 at each look is
# asked for instead of the usual 1 in 20.
CONFIDENCE = 3.0
FEWEST = 8  # audited rows before anything is concluded, and units before an interval is given
GROUPS = 200  # that units are drawn in for an interval


def is_audited(row: str, fraction: float) -> bool:
    """Whether a row is in the sample: a hash of its place in the input decides, in every session and on every retry."""
    digest = hashlib.sha256(f"audit\0{row}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") < fraction * 2**48


class Auditor:
    """Compares a replica's outputs with full depth, on the same engine."""

    def __init__(
        self,
        engine: Generator,
        tokenizer: Tokenizer,
        shape: ModelShape,
        sampling: Sampling,
        schedule: Schedule,
        batch_size: int | Literal["auto"],
        fraction: float,
    ) -> None:
        self._engine, self._schedule, self._ledger = engine, schedule, Ledger(shape, schedule)
        self._tokenizer = tokenizer
        self._samples = sampling.samples_per_prompt
        self._full_depth = RowGenerator(engine, replace(sampling, samples_per_prompt=1), None, batch_size)
        self._fraction = 0.0 if schedule.is_full_depth else fraction  # those would be compared with themselves

    def begin(self) -> None:
        """Have the engine load what it judges with: where there is no room for it, that is told before any row is."""
        if self._fraction:
            self._engine.score([[0]], [[0]], [self._schedule])

    def audit(
        self,
        prepared: pa.Table,
        ids: Sequence[str],
        answers: Mapping[int, Generation],
        on_batch: Callable[[BatchStats], None] | None = None,
    ) -> dict[str, float]:
        """What a unit's audited rows add to `Totals`, of those that have an answer; arguments as for
        `pipeline.rows.rows.generate`, answers as it tells them.

        Raises DeviceBroken; any other trouble leaves the unit unaudited.
        """
        if not self._fraction:
            return {}  # not a hash for every row
        names = {place: sample_name(ids[place // self._samples], place % self._samples) for place in sorted(answers)}
        audited = {place: name for place, name in names.items() if is_audited(name, self._fraction)}
        if not audited:
            return {}
        prompts = prepared[TOKENS].take([place // self._samples for place in audited]).to_pylist()
        try:
            full = self._full_depth.generate(prompts, [*audited.values()], on_batch)
            found = self._compare(prompts, full, [answers[place] for place in audited])
            if not all(map(math.isfinite, found.values())):
                raise ArithmeticError("full depth or the schedule gives probabilities that are no numbers")
            return found
        except Exception as error:  # a second opinion must not cost the first
            if isinstance(error, DeviceBroken) or is_device_broken(error):
                raise DeviceBroken(str(error)) from error
            log.warning("%d rows could not be audited (%s: %s)", len(audited), type(error).__name__, error)
            return {}

    def _compare(
        self, prompts: list[list[int]], found: Sequence[Generation | str], ours: list[Generation]
    ) -> dict[str, float]:
        # Not at the top: the metrics take seconds to import, and read and commit tasks do without them.
        from pipeline.reporting.text_metrics import overlap, repetition, unsupported

        good = [row for row, full in enumerate(found) if isinstance(full, Generation)]
        prompts, ours = [prompts[row] for row in good], [ours[row] for row in good]
        theirs = [full for full in found if isinstance(full, Generation)]
        pairs = list(zip(ours, theirs, strict=True))
        rouge = [overlap(answer.text, full.text).rouge_l for answer, full in pairs]
        written = [[answer.tokens for answer in answers] for answers in (theirs, ours)]
        (scores,), (full_nll, our_nll) = self._engine.score(prompts, written[0], [self._schedule], written[1:])
        sources = [self._tokenizer.decode(prompt) for prompt in prompts]
        measured: dict[str, float] = {
            "audited": len(pairs),
            "audit_rouge": sum(rouge),
            "audit_rouge_squares": sum(value * value for value in rouge),
            "audit_agreeing": sum(sum(score.agrees) for score in scores),
            "audit_steps": sum(len(score.agrees) for score in scores),
            "flops_audit": sum(self._flops(answer, full) for answer, full in pairs),
        }
        for whose, answers, nll in (("", ours, our_nll), ("full_", theirs, full_nll)):
            claims = [unsupported(answer.text, source) for answer, source in zip(answers, sources, strict=True)]
            measured |= {
                f"audit_{whose}nll": sum(nll),
                f"audit_{whose}tokens": sum(len(answer.tokens) for answer in answers),
                f"audit_{whose}repetition": sum(repetition(answer.text) for answer in answers),
                f"audit_{whose}unsupported": sum(map(len, claims)),
            }
        return measured

    def _flops(self, ours: Generation, full: Generation) -> int:
        """Generating at full depth, scoring that at both depths, and how likely both answers are."""
        prompt, shared = full.prompt_tokens, full.shared_prefix_tokens
        whole = self._ledger.full_depth
        flops = full.flops_full_depth + 2 * whole.shape.head_parameters  # the answers' first tokens
        # Prompts run once for all of that, unless the schedule has its own way with them.
        for ledger in (whole, self._ledger):
            if ledger is whole or not ledger.schedule.prompt_plan.is_full_depth:
                flops += ledger.prompt_layers(prompt, shared)
            flops += ledger.decode(prompt, full.generated_tokens)
        return flops + whole.decode(prompt, ours.generated_tokens)


def audit_estimate(totals: Totals) -> str:
    """The audit so far, for people; '' before its first row."""
    if not totals.audited:
        return ""
    agreement = f", agreement {totals.audit_agreeing / totals.audit_steps:.3f}" if totals.audit_steps else ""
    excess = excess_nll([totals])
    likely = f", excess NLL {excess.value:.3f}" if excess else ""
    rouge = totals.audit_rouge / totals.audited
    return f"ROUGE-L to full depth {rouge:.3f}{likely}{agreement} ({totals.audited:,} rows)"


def excess_nll(parts: Sequence[Totals]) -> Estimate | None:
    """Nats a token that full depth finds the audited answers less likely than its own; None before the first.

    The parts are sums over the rows of each unit, drawn for the interval, many of them together.
    """
    audited = [part for part in parts if part.audit_tokens]
    if not audited:
        return None
    merged = [sum(audited[first::GROUPS], Totals()) for first in range(min(GROUPS, len(audited)))]
    sums = [(part.audit_nll, part.audit_tokens, part.audit_full_nll, part.audit_full_tokens) for part in merged]
    nll, tokens, full_nll, full_tokens = np.array(sums, dtype=np.float64).T
    return Bootstrap(len(merged)).difference((nll, tokens), (full_nll, full_tokens))


def audit_facts(parts: Sequence[Totals]) -> dict[str, str]:
    """What the audit of a run's units has found, for its report and card; {} without one.

    Units that were audited before such figures were taken have none.
    """
    audited = [part for part in parts if part.audit_tokens]
    excess, totals = excess_nll(audited), sum(audited, Totals())
    if excess is None:
        return {}
    interval = f" [{excess.low:.3f}, {excess.high:.3f}]" if len(audited) >= FEWEST else ""
    rows = totals.audited
    return {
        "excess NLL": f"{excess.value:.3f}{interval} nats a token, of {rows:,} audited rows",
        "ROUGE-L to full depth": f"{totals.audit_rouge / rows:.3f}",
        "repetition": f"{totals.audit_repetition / rows:.1%}, full depth {totals.audit_full_repetition / rows:.1%}",
        "length": f"{totals.audit_tokens / totals.audit_full_tokens:.3f} of full depth's",
        "unsupported claims": f"{totals.audit_unsupported / rows:.2f} numbers and names an answer that its prompt does "
        f"not hold, full depth {totals.audit_full_unsupported / rows:.2f}",
    }


def fails_audit(totals: Totals, minimum: float) -> bool:
    """Whether mean ROUGE-L lies below the minimum, beyond what chance explains.

    A perfect row is counted in: a few equal rows would have no spread, and would be believed at once.
    """
    if totals.audited < FEWEST:
        return False
    count = totals.audited + 1
    mean = (totals.audit_rouge + 1) / count
    variance = max(0.0, (totals.audit_rouge_squares + 1) / count - mean**2)
    return mean + CONFIDENCE * math.sqrt(variance / count) < minimum


def failed_audit(config: JobConfig, totals: Totals, rows: int) -> str:
    """Why a job over so many rows stops, and the ways on; '' while it need not."""
    minimum = config.min_audit_rouge
    if minimum is None or not fails_audit(totals, minimum):
        return ""
    way_on = (
        "they stay, and a job started again counts its own alone: start none before there is a better schedule (see "
        "jobs/calibrate_schedule.py), with an output of its own"
        if config.incremental
        else "start the job again with a lower minimum to accept that and resume, or anew with a better schedule (see "
        "jobs/calibrate_schedule.py) and --fresh"
    )
    return (
        f"the schedule's outputs are too far from full depth: {audit_estimate(totals)}, less than min_audit_rouge "
        f"{minimum:g}, after {totals.rows:,} of {rows:,} rows; {way_on}"
    )
