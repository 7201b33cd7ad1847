"""What contenders took and gave, and what they are to each other. A share is a fraction of 1, x is times as fast."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from engine import Ledger, ModelShape, Schedule
from engine.kernels import kernels_for
from pipeline.reporting.text_metrics import overlap

MATRIX = {"cpu": 2048, "cuda": 8192}  # wide enough to keep every unit busy
REPEATS = 7


@dataclass(frozen=True)
class WholeJob:
    """The job that all contenders run."""

    shape: ModelShape
    prompt_tokens: Sequence[int]  # of each row
    shared: int  # tokens that all prompts begin with
    references: Sequence[str]  # of each row


@dataclass
class Measured:
    """A contender and its rounds."""

    name: str
    runner: str
    schedule: Schedule | None  # as it is run; None: full depth
    version: str = ""
    load_seconds: float = 0.0
    rounds: list[dict[str, Any]] = field(default_factory=list)  # seconds and what it could tell of them
    cache_course: Sequence[int] | None = None  # of the last round
    answers: Sequence[Sequence[int]] = ()  # of the last round, without the token that ended them
    generated: Sequence[int] = ()  # tokens of each answer, the one that ended it included
    texts: Sequence[str] = ()


class Flops(NamedTuple):
    """Of a whole job, by the ledger."""

    prompts: int
    decoding: int

    @property
    def total(self) -> int:
        return self.prompts + self.decoding


def multiply_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of large square matrices, one of them packed as the engine's weights are.

    On some CPUs plain products run at half of that: the library behind them has no code for these.
    """
    width = MATRIX[device.type]
    matrix = torch.randn(width, width, device=device).to(dtype)
    product = kernels_for(device, dtype).inner_linear(matrix)
    times = []
    for _ in range(REPEATS + 1):  # the first warms up
        start = time.perf_counter()
        product(matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * width**3 / median(times[1:])


def flops(task: WholeJob, schedule: Schedule | None, generated: Sequence[int]) -> Flops:
    """Of answers of so many tokens to the task's prompts, what these share being computed once."""
    ledger = Ledger(task.shape, schedule or Schedule.full_depth(task.shape.layers))
    prompts = sum(ledger.prompt(tokens, task.shared) for tokens in task.prompt_tokens)
    decoding = sum(ledger.decode(*lengths) for lengths in zip(task.prompt_tokens, generated, strict=True))
    return Flops(prompts + ledger.prefix(task.shared), decoding)


def figures(measured: Sequence[Measured], task: WholeJob, rates: Sequence[float]) -> list[dict[str, Any]]:
    """Every contender's, beside the first one's, which runs at full depth.

    Args:
        rates: FLOP/s of large matrix products in each round.

    Ratios are taken within a round, where the machine was equally fast for both, and the median round is given.
    """
    reference = measured[0]
    whole = {each.runner: each for each in measured if each.schedule is None}
    return [_figures(each, reference, whole.get(each.runner), task, rates) for each in measured]


def _figures(
    each: Measured, reference: Measured, whole: Measured | None, task: WholeJob, rates: Sequence[float]
) -> dict[str, Any]:
    """`whole`: the same runner at full depth."""
    cost, rows = flops(task, each.schedule, each.generated), len(task.prompt_tokens)
    rouge_l, whole_rouge_l = (_rouge_l(one, task.references) for one in (each, reference))
    found: dict[str, Any] = {
        "name": each.name,
        "runner": each.runner,
        "version": each.version,
        "load_seconds": each.load_seconds,
        "rows_per_s": median(rows / seconds for seconds in _told(each, "seconds")),
        **{
            name: median(told) if (told := _told(each, name)) else None
            for name in ("seconds", "prompt_seconds", "decode_seconds", "occupancy")
        },
        "over_reference": _faster(each, reference),
        "decode_over_reference": _faster(each, reference, "decode_seconds"),
        "output_tokens": sum(each.generated),
        "floor_prompt_seconds": median(cost.prompts / rate for rate in rates),
        "floor_decode_seconds": median(cost.decoding / rate for rate in rates),
        "share_of_floor": median(
            cost.total / rate / run["seconds"] for rate, run in zip(rates, each.rounds, strict=True)
        ),
        "same_rows": mean(ours == theirs for ours, theirs in zip(each.answers, reference.answers, strict=True)),
        "rouge_l": rouge_l,
        "rouge_l_share": rouge_l / whole_rouge_l if rouge_l is not None and whole_rouge_l else None,
        "rouge_l_to_reference": _rouge_l(each, reference.texts),
        "cache_course": each.cache_course,
        "rounds": each.rounds,
    }
    if each.schedule is not None:
        same = flops(task, None, each.generated)
        found |= {"decode_flop_x": same.decoding / (cost.decoding or 1), "sample_flop_x": same.total / cost.total}
        if whole is not None:
            # Answers may be shorter: work and time are both those of the two runs, each with its own.
            job, real = flops(task, None, whole.generated).total / cost.total, _faster(each, whole) or 0.0
            found |= {"job_flop_x": job, "measured_x": real, "realised_share": real / job}
    return found


def _told(each: Measured, name: str) -> list[float]:
    return [run[name] for run in each.rounds if run[name] is not None]


def _faster(each: Measured, other: Measured, part: str = "seconds") -> float | None:
    """The median of ratios within a round; None where one of them can't tell."""
    pairs = [(mine[part], theirs[part]) for mine, theirs in zip(each.rounds, other.rounds, strict=True)]
    ratios = [their / our for our, their in pairs if our is not None and their is not None]
    return median(ratios) if ratios else None


def _rouge_l(each: Measured, references: Sequence[str]) -> float | None:
    """To those that are there, which an empty answer would else be like; None if there are none."""
    pairs = zip(each.texts, references, strict=True)
    found = [overlap(text, reference).rouge_l for text, reference in pairs if reference.strip()]
    return mean(found) if found else None
