"""What one run of one contender took, and what contenders are to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of one batch."""

    prefill_seconds: float
    decode_seconds: float
    rows: int
    new_tokens: int

    @property
    def output_rate(self) -> float:
        """Output tokens/s of the whole run, prompts included."""
        return self.rows * self.new_tokens / (self.prefill_seconds + self.decode_seconds)

    @property
    def decode_rate(self) -> float:
        """Output tokens/s while decoding: the first token comes from the prompt pass."""
        return self.rows * (self.new_tokens - 1) / self.decode_seconds


@dataclass
class TimedContender:
    """Something that generates for a batch of prompts."""

    name: str
    run: Callable[[], Timing]
    flop_speedup: float | None = None  # of decoding, over full depth; None: not this engine
    floor_seconds: float | None = None  # least that decoding can take on this machine
    timings: list[Timing] = field(default_factory=list)


def take_turns(
    contenders: Sequence[TimedContender], rounds: int, track: Callable[[Iterable[int]], Iterable[int]] = iter
) -> None:
    """Time every contender once a round, in a rotating order, after a round that warms up; `track` shows progress."""
    for turn in track(range(rounds + 1)):
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            timing = contender.run()
            if turn:
                contender.timings.append(timing)


def compare(contenders: Sequence[TimedContender], full_depth: str) -> list[dict[str, Any]]:
    """Medians of each contender, and of its ratios to the others round by round: a drifting machine favours nobody."""
    by_name = {contender.name: contender for contender in contenders}
    baselines = [contender.name for contender in contenders if contender.flop_speedup is None]

    def ratio(contender: TimedContender, baseline: str, rate: Callable[[Timing], float]) -> float:
        pairs = zip(contender.timings, by_name[baseline].timings, strict=True)
        return median(rate(ours) / rate(theirs) for ours, theirs in pairs)

    rows = []
    for contender in contenders:
        row: dict[str, Any] = {
            "name": contender.name,
            "output_tokens_per_s": median(timing.output_rate for timing in contender.timings),
            "decode_tokens_per_s": median(timing.decode_rate for timing in contender.timings),
            "prefill_seconds": median(timing.prefill_seconds for timing in contender.timings),
            "decode_seconds": median(timing.decode_seconds for timing in contender.timings),
            "output_over": {name: ratio(contender, name, lambda t: t.output_rate) for name in baselines},
            "decode_over": {name: ratio(contender, name, lambda t: t.decode_rate) for name in baselines},
            "timings": [asdict(timing) for timing in contender.timings],
        }
        if contender.flop_speedup is not None:
            measured = ratio(contender, full_depth, lambda timing: timing.decode_rate)
            row |= {
                "decode_flop_speedup": contender.flop_speedup,
                "measured_speedup": measured,
                "realised_share": measured / contender.flop_speedup,
            }
        if contender.floor_seconds is not None:
            row["share_of_floor"] = median(contender.floor_seconds / t.decode_seconds for t in contender.timings)
        rows.append(row)
    return rows
