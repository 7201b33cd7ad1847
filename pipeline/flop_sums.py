"""Ratios of FLOP sums, for a run that is planned and one that is done."""

from __future__ import annotations


class FlopSums:
    """Sums over rows, as the ledger counts them; prompts run at full depth with and without a schedule."""

    __slots__ = ()
    flops_prompt: int
    flops_decode: int
    flops_full_depth: int  # prompt and decode

    @property
    def flops(self) -> int:
        return self.flops_prompt + self.flops_decode

    @property
    def decode_speedup(self) -> float:
        """Full-depth decode FLOPs / scheduled decode FLOPs."""
        return (self.flops_full_depth - self.flops_prompt) / self.flops_decode if self.flops_decode else 1.0

    @property
    def sample_speedup(self) -> float:
        """The same for whole samples, prompts included."""
        return self.flops_full_depth / self.flops if self.flops else 1.0
