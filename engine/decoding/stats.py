"""What passes cost."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class BatchStats:
    """What some passes cost. FLOPs of the samples are those of the ledger; padding is what was computed for nobody.

    Prompts and decoding share passes; their seconds are the passes', by FLOPs.
    """

    samples: int = 0  # that ended
    prompt_tokens: int = 0  # computed
    generated_tokens: int = 0
    steps: int = 0  # passes
    live_rows: int = 0  # summed over the passes
    seats: int = 0  # that there were for them, summed over the passes
    flops_padding: int = 0
    preemptions: int = 0  # rows that lost what they had in the cache, and are computed again
    cache_course: tuple[int, ...] = ()  # bytes of the key/value cache in each pass
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def cache_bytes(self) -> int:
        """Most memory the key/value cache took."""
        return max(self.cache_course, default=0)

    @property
    def occupancy(self) -> float:
        """Share of the seats that had a row."""
        return self.live_rows / max(1, self.seats)

    def __add__(self, other: "BatchStats") -> "BatchStats":
        return BatchStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))
