"""Figures of a study: every contender's quality, lengths and cost, with 95 % bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from engine import Schedule
from engine.bootstrap import Bootstrap, Estimate, Values
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.study import LIKELIHOODS, OUTPUTS, BatchTiming, Prompt, Study
from pipeline.reporting.text_metrics import Overlap, overlap, repetition, unsupported

METRICS = Overlap._fields
NOTHING = Overlap(0.0, 0.0, 0.0, 0.0)
EARLY = 0.5  # of full depth's length: an output that ends before this has stopped early
WORST = 10


@dataclass(frozen=True)
class Outputs:
    """A contender's outputs beside full depth's, row by row in the prompts' order."""

    contender: Contender
    prompts: Sequence[Prompt]
    rows: Sequence[dict[str, Any]]
    full: Sequence[dict[str, Any]]
    timings: Sequence[BatchTiming]
    full_timings: Sequence[BatchTiming]

    @cached_property
    def against_reference(self) -> list[Overlap]:
        """Of rows without a reference: nothing, which an empty answer would else be like."""
        return [
            overlap(row["generation"], p.reference) if p.reference.strip() else NOTHING
            for row, p in zip(self.rows, self.prompts, strict=True)
        ]

    @cached_property
    def against_full_depth(self) -> list[Overlap]:
        return [overlap(row["generation"], full["generation"]) for row, full in zip(self.rows, self.full, strict=True)]

    @cached_property
    def repetition(self) -> list[float]:
        return [repetition(row["generation"]) for row in self.rows]

    @cached_property
    def unsupported(self) -> list[list[str]]:
        return [unsupported(row["generation"], p.read) for row, p in zip(self.rows, self.prompts, strict=True)]

    @cached_property
    def nll(self) -> Values:
        """Of each answer under full depth, nats a token."""
        return self.column("nll") / np.maximum(1, self.column("generated_tokens"))

    def column(self, name: str) -> Values:
        """A number of each row."""
        return np.array([row[name] for row in self.rows], dtype=np.float64)

    def full_column(self, name: str) -> Values:
        """The same of full depth's rows."""
        return np.array([row[name] for row in self.full], dtype=np.float64)


@dataclass(frozen=True)
class Figures:
    """What the report shows of a contender. Speed-ups compare with full depth; shares are of full depth's figure."""

    label: str
    name: str  # of its line in the figures
    target: float | None
    is_rival: bool
    note: str
    rows: int
    sample_flop_speedup: Estimate | None  # prompts included
    decode_flop_speedup: Estimate | None
    measured_speedup: float | None  # decode tokens/s over full depth's, median over batches of one session
    mean_active_layers: Estimate
    kl: Estimate | None  # nats per decode token, teacher-forced
    nll: Estimate  # of its answers under full depth, nats a token
    excess_nll: Estimate | None  # that, less the same of full depth's own answers
    agreement: Estimate | None  # share of decode tokens whose likeliest token is full depth's, teacher-forced
    against_reference: dict[str, Estimate]
    share_of_full_depth: dict[str, Estimate | None]
    against_full_depth: dict[str, Estimate]
    exact_match: Estimate
    length_ratio: Estimate | None  # generated tokens over full depth's
    repetition: Estimate  # share of an answer's runs of three words that it already held
    unsupported: Estimate  # numbers and names of an answer that its prompt does not hold
    early_stops: Estimate
    agreement_by_step: list[tuple[int, float, int]] = field(default_factory=list)  # step, share, tokens

    def to_dict(self) -> dict[str, Any]:
        """For JSON; an estimate becomes [value, low, high]."""
        return asdict(self)


def read_outputs(study: Study, contenders: Sequence[Contender]) -> list[Outputs]:
    """Of a finished study. The first contender is full depth."""
    full, full_timings = study.outputs(contenders[0]).to_pylist(), study.timings(contenders[0])
    return [
        Outputs(c, study.prompts, study.outputs(c).to_pylist(), full, study.timings(c), full_timings)
        for c in contenders
    ]


def figures(outputs: Outputs, reference: Outputs, bootstrap: Bootstrap) -> Figures:
    """Of one contender; `reference` is full depth's own outputs."""
    rows = outputs.rows
    ours, theirs = (_scores(found.against_reference) for found in (outputs, reference))
    same = _scores(outputs.against_full_depth)
    steps = np.array([len(row["agrees"] or ()) for row in rows], dtype=np.float64)
    prompt, decode = outputs.column("flops_prompt"), outputs.column("flops_decode")
    whole, lengths = outputs.column("flops_full_depth"), outputs.column("generated_tokens")
    full_lengths = outputs.full_column("generated_tokens")
    nll, full_nll = outputs.column("nll"), outputs.full_column("nll")
    exact = [row["generation"] == full["generation"] for row, full in zip(rows, outputs.full, strict=True)]
    early = (lengths < EARLY * full_lengths) & np.array([row["finish_reason"] == "stop" for row in rows])
    contender = outputs.contender
    return Figures(
        label=contender.label,
        name=contender.line,
        target=contender.target,
        is_rival=contender.is_rival,
        note=contender.note,
        rows=len(rows),
        sample_flop_speedup=bootstrap.ratio(whole, prompt + decode),
        decode_flop_speedup=bootstrap.ratio(outputs.column("flops_decode_full_depth"), decode),
        measured_speedup=_measured(outputs),
        mean_active_layers=_mean(bootstrap, outputs.column("mean_active_layers") * lengths, lengths),
        kl=bootstrap.ratio(np.array([sum(row["kl"] or ()) for row in rows]), steps),
        nll=_mean(bootstrap, nll, lengths),
        excess_nll=bootstrap.difference((nll, lengths), (full_nll, full_lengths)),
        agreement=bootstrap.ratio(np.array([float(sum(row["agrees"] or ())) for row in rows]), steps),
        against_reference={name: bootstrap.mean(ours[name]) for name in METRICS},
        share_of_full_depth={name: bootstrap.ratio(ours[name], theirs[name]) for name in METRICS},
        against_full_depth={name: bootstrap.mean(same[name]) for name in METRICS},
        exact_match=bootstrap.mean(np.array(exact, dtype=np.float64)),
        length_ratio=bootstrap.ratio(lengths, full_lengths),
        repetition=bootstrap.mean(np.array(outputs.repetition)),
        unsupported=bootstrap.mean(np.array([float(len(claims)) for claims in outputs.unsupported])),
        early_stops=bootstrap.mean(early.astype(np.float64)),
        agreement_by_step=_by_step(rows),
    )


def worst(outputs: Outputs, reference: Outputs, count: int = WORST) -> list[dict[str, Any]]:
    """The rows whose answers full depth finds least likely beside its own, nats a token, the worst first."""
    order = np.argsort(reference.nll - outputs.nll, kind="stable")[:count]
    return [
        {
            "id": outputs.prompts[row].id,
            "text": outputs.prompts[row].text,
            "reference": outputs.prompts[row].reference,
            "full_depth": _shown(reference, row),
            "contender": _shown(outputs, row),
        }
        for row in order.tolist()
    ]


def _shown(outputs: Outputs, row: int) -> dict[str, Any]:
    """An answer and what is measured of it."""
    return {
        "generation": outputs.rows[row]["generation"],
        "nll": float(outputs.nll[row]),
        "rouge_l": outputs.against_reference[row].rouge_l,
        "repetition": outputs.repetition[row],
        "unsupported": outputs.unsupported[row],
    }


def combined(all_outputs: Sequence[Outputs]) -> pa.Table:
    """Outputs of all contenders in one table, with the label and the metrics of each row."""
    records = [
        {
            "contender": outputs.contender.label,
            "target": outputs.contender.target,
            "is_rival": outputs.contender.is_rival,
            **row,
            "reference": prompt.reference,
            "repetition": repeated,
            "unsupported": claims,
            **{f"{name}_to_reference": value for name, value in against._asdict().items()},
            **{f"{name}_to_full_depth": value for name, value in same._asdict().items()},
        }
        for outputs in all_outputs
        for row, prompt, repeated, claims, against, same in zip(
            outputs.rows,
            outputs.prompts,
            outputs.repetition,
            outputs.unsupported,
            outputs.against_reference,
            outputs.against_full_depth,
            strict=True,
        )
    ]
    return pa.Table.from_pylist(records, _COMBINED)


def _scores(found: Sequence[Overlap]) -> dict[str, Values]:
    columns = np.array(found, dtype=np.float64).reshape(-1, len(METRICS))
    return {name: columns[:, index] for index, name in enumerate(METRICS)}


def _mean(bootstrap: Bootstrap, values: Values, weights: Values) -> Estimate:
    estimate = bootstrap.ratio(values, weights)
    assert estimate is not None  # every row counts and has a first token
    return estimate


def _measured(outputs: Outputs) -> float | None:
    """Median over the batches that both have decoded in the same session; None without any."""
    if not isinstance(outputs.contender.method, Schedule):
        return None
    ratios = [
        (ours.decode_passes / ours.decode_seconds) / (full.decode_passes / full.decode_seconds)
        for ours, full in zip(outputs.timings, outputs.full_timings, strict=True)
        if ours.session == full.session and ours.decode_passes and full.decode_passes
    ]
    return median(ratios) if ratios else None


def _by_step(rows: Sequence[dict[str, Any]]) -> list[tuple[int, float, int]]:
    longest = max((len(row["agrees"] or ()) for row in rows), default=0)
    found = []
    for step in range(longest):
        agrees = [row["agrees"][step] for row in rows if len(row["agrees"]) > step]
        found.append((step, sum(agrees) / len(agrees), len(agrees)))
    return found


_COMBINED = pa.schema(
    [
        ("contender", pa.string()),
        ("target", pa.float64()),
        ("is_rival", pa.bool_()),
        ("reference", pa.string()),
        *OUTPUTS,
        LIKELIHOODS.field("nll"),
        ("repetition", pa.float64()),
        ("unsupported", pa.list_(pa.string())),
        *((f"{name}_to_reference", pa.float64()) for name in METRICS),
        *((f"{name}_to_full_depth", pa.float64()) for name in METRICS),
    ]
)
