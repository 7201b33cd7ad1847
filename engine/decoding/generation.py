"""One generation: under way, from its place in the queue to its last token, and what comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.decoding.sampling import Sampling
from engine.decoding.stopping import Stopping
from engine.errors import PromptError
from engine.forward.ledger import Ledger


@dataclass(slots=True, eq=False)
class Sample:
    """One generation under way."""

    index: int  # of the prompt, as its caller counts
    copy: int  # which of the prompt's samples
    sample_id: str
    prompt: Sequence[int]
    limit: int  # most tokens it may generate
    seat: int = -1  # while it runs, whose state it has in cache and sampler
    shares_prompt: bool = False  # another sample has computed this prompt in the same pass
    shared_prefix: int = 0  # tokens of the prompt that a prefix has computed for all
    tokens: list[int] = field(default_factory=list)
    ended: bool = False  # by end-of-sequence or a stop string

    @property
    def step(self) -> int:
        """The decode step of its next pass."""
        return len(self.tokens) - 1

    @property
    def length(self) -> int:
        """Tokens so far, prompt and generation."""
        return len(self.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens at its end, should it get there."""
        return len(self.prompt) + self.limit

    @property
    def finished(self) -> bool:
        return self.ended or len(self.tokens) >= self.limit


def samples_of(
    prompt: Sequence[int], sample_id: str, index: int, sampling: Sampling, context: int, vocab: int
) -> list[Sample]:
    """All of a prompt's. Raises PromptError where it is empty, does not fit the context, or has tokens that the model
    does not: a tokenizer may name more. On a GPU such a token would end the process.
    """
    if not len(prompt):
        raise PromptError(f"prompt {index} is empty")
    if len(prompt) >= context:
        raise PromptError(f"prompt {index} has {len(prompt)} tokens, the context is {context}")
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        strange = next(token for token in prompt if not 0 <= token < vocab)
        raise PromptError(f"prompt {index} has token {strange}, the model's vocabulary ends at {vocab - 1}")
    limit = min(sampling.max_new_tokens, context - len(prompt))
    copies = range(sampling.samples_per_prompt)
    return [Sample(index, copy, sample_name(sample_id, copy), prompt, limit) for copy in copies]


def sample_name(sample_id: str, copy: int) -> str:
    """What names the random stream of one of a prompt's samples."""
    return f"{sample_id}\0{copy}" if copy else sample_id


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
