"""Ratios of FLOP sums, for a run that is planned and one that is done."""


class FlopSums:
    """Sums over rows, as the ledger counts them."""

    __slots__ = ()
    flops_prompt: int
    flops_decode: int
    flops_decode_full_depth: int
    flops_full_depth: int  # prompt and decode

    @property
    def flops(self) -> int:
        return self.flops_prompt + self.flops_decode

    @property
    def decode_speedup(self) -> float:
        """Full-depth decode FLOPs / scheduled decode FLOPs."""
        return self.flops_decode_full_depth / self.flops_decode if self.flops_decode else 1.0

    @property
    def prompt_speedup(self) -> float:
        """Full-depth prompt FLOPs / prompt FLOPs."""
        full_depth = self.flops_full_depth - self.flops_decode_full_depth
        return full_depth / self.flops_prompt if self.flops_prompt else 1.0

    @property
    def sample_speedup(self) -> float:
        """The same for whole samples, prompts included."""
        return self.flops_full_depth / self.flops if self.flops else 1.0
