"""Figures of a study: every contender's quality, lengths and cost, with 95 % bootstrap intervals over prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from statistics import median
from typing import Any, Self

import numpy as np
import pyarrow as pa

from engine.bootstrap import Bootstrap, Estimate, Values
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.study import OUTPUTS, BatchTiming, Prompt, Study
from pipeline.reporting.text_metrics import Overlap, overlap, repetition, unsupported

METRICS = Overlap._fields
UNKNOWN = Overlap(*[math.nan] * len(METRICS))
EARLY = 0.5  # of full depth's length: an output that ends before this has stopped early
WORST = 10


@dataclass(frozen=True)
class Outputs:
    """A contender's outputs, row by row in the prompts' order, and full depth's to compare with."""

    contender: Contender
    prompts: Sequence[Prompt]
    rows: Sequence[dict[str, Any]]
    timings: Sequence[BatchTiming]
    full_depth: Self | None = None  # None: these are

    @property
    def full(self) -> Self:
        """Full depth's."""
        return self.full_depth or self

    @cached_property
    def against_reference(self) -> list[Overlap | None]:
        """None of rows without a reference, which an empty answer would else be like."""
        return [
            overlap(row["generation"], p.reference) if p.reference.strip() else None
            for row, p in zip(self.rows, self.prompts, strict=True)
        ]

    @cached_property
    def against_full_depth(self) -> list[Overlap]:
        pairs = zip(self.rows, self.full.rows, strict=True)
        return [overlap(row["generation"], full["generation"]) for row, full in pairs]

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


@dataclass(frozen=True)
class Figures:
    """What the report shows of a contender. Speed-ups compare with full depth; shares are of full depth's figure."""

    label: str
    name: str  # of its line in the figures
    target: float | None
    prompt_layers: int | None  # that prompts run, where these are fewer than all
    is_rival: bool
    note: str
    rows: int
    sample_flop_speedup: Estimate | None  # prompts included
    decode_flop_speedup: Estimate | None
    measured_speedup: float | None  # decode tokens/s over full depth's, median over batches of one session
    mean_active_layers: Estimate | None
    kl: Estimate | None  # nats per decode token, teacher-forced
    nll: Estimate | None  # of its answers under full depth, nats a token
    excess_nll: Estimate | None  # that, less the same of full depth's own answers
    agreement: Estimate | None  # share of decode tokens whose likeliest token is full depth's, teacher-forced
    against_reference: dict[str, Estimate | None]  # over rows that have one
    share_of_full_depth: dict[str, Estimate | None]
    against_full_depth: dict[str, Estimate]
    exact_match: Estimate
    length_ratio: Estimate | None  # generated tokens over full depth's
    repetition: Estimate  # share of an answer's runs of three words that it already held
    unsupported: Estimate  # numbers and names of an answer that its prompt does not hold
    early_stops: Estimate
    agreement_by_step: list[tuple[int, float, int]]  # step, share, tokens


def read_outputs(study: Study, contenders: Sequence[Contender]) -> list[Outputs]:
    """Of a finished study. The first contender is full depth."""
    found: list[Outputs] = []
    for each in contenders:
        rows, full = study.outputs(each).to_pylist(), found[0] if found else None
        found.append(Outputs(each, study.prompts, rows, study.timings(each), full))
    return found


def figures(outputs: Outputs, bootstrap: Bootstrap) -> Figures:
    """Of one contender."""
    rows, full = outputs.rows, outputs.full
    ours, theirs = (
        {name: np.nan_to_num(values) for name, values in _scores(each.against_reference).items()}
        for each in (outputs, full)
    )
    same = _scores(outputs.against_full_depth)
    referred = np.array([float(each is not None) for each in outputs.against_reference])
    steps = np.array([len(row["agrees"] or ()) for row in rows], dtype=np.float64)
    prompt, decode = outputs.column("flops_prompt"), outputs.column("flops_decode")
    whole, lengths = outputs.column("flops_full_depth"), outputs.column("generated_tokens")
    full_lengths, nll = full.column("generated_tokens"), outputs.column("nll")
    exact = [row["generation"] == other["generation"] for row, other in zip(rows, full.rows, strict=True)]
    early = (lengths < EARLY * full_lengths) & np.array([row["finish_reason"] == "stop" for row in rows])
    contender = outputs.contender
    return Figures(
        label=contender.label,
        name=contender.line,
        target=contender.target,
        prompt_layers=contender.prompt_layers,
        is_rival=contender.is_rival,
        note=contender.note,
        rows=len(rows),
        sample_flop_speedup=bootstrap.ratio(whole, prompt + decode),
        decode_flop_speedup=bootstrap.ratio(outputs.column("flops_decode_full_depth"), decode),
        measured_speedup=_measured(outputs),
        mean_active_layers=bootstrap.ratio(outputs.column("mean_active_layers") * lengths, lengths),
        kl=bootstrap.ratio(np.array([sum(row["kl"] or ()) for row in rows]), steps),
        nll=bootstrap.ratio(nll, lengths),
        excess_nll=bootstrap.difference((nll, lengths), (full.column("nll"), full_lengths)),
        agreement=bootstrap.ratio(np.array([float(sum(row["agrees"] or ())) for row in rows]), steps),
        against_reference={name: bootstrap.ratio(ours[name], referred) for name in METRICS},
        share_of_full_depth={name: bootstrap.ratio(ours[name], theirs[name]) for name in METRICS},
        against_full_depth={name: bootstrap.mean(same[name]) for name in METRICS},
        exact_match=bootstrap.mean(np.array(exact, dtype=np.float64)),
        length_ratio=bootstrap.ratio(lengths, full_lengths),
        repetition=bootstrap.mean(np.array(outputs.repetition)),
        unsupported=bootstrap.mean(np.array([float(len(claims)) for claims in outputs.unsupported])),
        early_stops=bootstrap.mean(early.astype(np.float64)),
        agreement_by_step=_by_step(rows),
    )


def worst(outputs: Outputs, count: int = WORST) -> list[dict[str, Any]]:
    """The rows whose answers full depth finds least likely beside its own, nats a token, the worst first."""
    order = np.argsort(outputs.full.nll - outputs.nll, kind="stable")[:count]
    return [
        {
            "id": outputs.prompts[row].id,
            "text": outputs.prompts[row].text,
            "reference": outputs.prompts[row].reference,
            "full_depth": _shown(outputs.full, row),
            "contender": _shown(outputs, row),
        }
        for row in order.tolist()
    ]


def _shown(outputs: Outputs, row: int) -> dict[str, Any]:
    """An answer and what is measured of it."""
    against = outputs.against_reference[row]
    return {
        "generation": outputs.rows[row]["generation"],
        "nll": float(outputs.nll[row]),
        "rouge_l": None if against is None else against.rouge_l,
        "repetition": outputs.repetition[row],
        "unsupported": outputs.unsupported[row],
    }


def combined(all_outputs: Sequence[Outputs]) -> pa.Table:
    """Outputs of all contenders in one table, with the label and the metrics of each row."""
    return pa.concat_tables(map(_table, all_outputs))


def _table(outputs: Outputs) -> pa.Table:
    rows, contender = outputs.rows, outputs.contender
    overlaps: dict[str, Sequence[Overlap | None]] = {
        "reference": outputs.against_reference,
        "full_depth": outputs.against_full_depth,
    }
    scores = {
        f"{name}_to_{what}": pa.array(values, from_pandas=True)  # null for NaN
        for what, found in overlaps.items()
        for name, values in _scores(found).items()
    }
    columns = {
        "contender": [contender.label] * len(rows),
        "target": pa.array([contender.target] * len(rows), pa.float64()),
        "is_rival": [contender.is_rival] * len(rows),
        "reference": [prompt.reference for prompt in outputs.prompts],
        **{field.name: pa.array([row[field.name] for row in rows], field.type) for field in OUTPUTS},
        "repetition": outputs.repetition,
        "unsupported": pa.array(outputs.unsupported, pa.list_(pa.string())),
        **scores,
    }
    return pa.table(columns)


def _scores(found: Sequence[Overlap | None]) -> dict[str, Values]:
    """Of each row; NaN where it has none."""
    columns = np.array([each or UNKNOWN for each in found], dtype=np.float64).reshape(-1, len(METRICS))
    return {name: columns[:, index] for index, name in enumerate(METRICS)}


def _measured(outputs: Outputs) -> float | None:
    """Median over the batches that both have decoded in the same session; None without any."""
    ratios = [
        (ours.decode_passes / ours.decode_seconds) / (full.decode_passes / full.decode_seconds)
        for ours, full in zip(outputs.timings, outputs.full.timings, strict=True)
        if ours.session == full.session and ours.decode_passes and full.decode_passes
    ]
    return median(ratios) if ratios else None


def _by_step(rows: Sequence[dict[str, Any]]) -> list[tuple[int, float, int]]:
    by_step = zip_longest(*(row["agrees"] or () for row in rows))
    answered = [[agrees for agrees in each if agrees is not None] for each in by_step]
    return [(step, sum(found) / len(found), len(found)) for step, found in enumerate(answered)]
