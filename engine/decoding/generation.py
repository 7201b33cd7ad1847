"""What comes out for one sample."""

from __future__ import annotations

from dataclasses import dataclass

from engine.decoding.sample import Sample
from engine.decoding.stopping import Stopping
from engine.forward.ledger import Ledger


@dataclass(slots=True)  # frozen, it would take six times as long to make, of millions of them
class Generation:
    """One sample's text and what it cost. FLOPs are the ledger's, on the sample's own lengths."""

    index: int  # of its prompt in the call
    sample: int  # which of the prompt's samples
    text: str
    tokens: tuple[int, ...]  # all that were sampled, the end-of-sequence token included
    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    shared_prefix_tokens: int  # of these, computed once for all prompts: see `Engine.share_prefix`
    flops_prompt: int  # of the others; 0 where another sample of the same prompt has paid for it in the same pass
    flops_decode: int
    flops_decode_full_depth: int  # of the same tokens with nothing skipped
    flops_full_depth: int  # prompt + decode of the same tokens with nothing skipped
    mean_active_layers: float

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens)


def generation_of(sample: Sample, stopping: Stopping, ledger: Ledger) -> Generation:
    """Of a finished sample."""
    prompt_tokens, generated = len(sample.prompt), len(sample.tokens)
    flops_prompt, flops_prompt_full = (
        0 if sample.shares_prompt else each.prompt(prompt_tokens, sample.shared_prefix)
        for each in (ledger, ledger.full_depth)
    )
    flops_decode_full = ledger.full_depth.decode(prompt_tokens, generated)
    return Generation(
        index=sample.index,
        sample=sample.copy,
        text=stopping.text(sample.tokens),
        tokens=tuple(sample.tokens),
        finish_reason="stop" if sample.ended else "length",
        prompt_tokens=prompt_tokens,
        shared_prefix_tokens=sample.shared_prefix,
        flops_prompt=flops_prompt,
        flops_decode=ledger.decode(prompt_tokens, generated),
        flops_decode_full_depth=flops_decode_full,
        flops_full_depth=flops_prompt_full + flops_decode_full,
        mean_active_layers=ledger.mean_active_layers(generated),
    )
