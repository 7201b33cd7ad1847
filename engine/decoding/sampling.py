"""From logits to tokens: greedy or sampled, each sample on a random stream of its own."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CANDIDATES = 1024  # tokens looked at first for top-p: a full sort of the vocabulary costs half a decode step on a CPU
COLDEST = 1e-6  # temperature: logits that are divided by less may overflow
NO_TOKEN = -1  # of a row whose logits are not numbers
BLOCK = 256  # tokens that are drawn for together before one of them is: near the root of a vocabulary's size


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when a generation ends. The defaults are greedy."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0  # end-of-sequence and stop strings are held back before
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0  # drop tokens less likely than min_p x the likeliest
    repetition_penalty: float = 1.0  # of CTRL (arXiv 1909.05858); 1 is off
    stop: tuple[str, ...] = ()  # a generation ends before the first of these strings
    samples_per_prompt: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        whole = self.max_new_tokens, self.min_new_tokens, self.top_k, self.samples_per_prompt, self.seed
        checks = {
            "stop must be a tuple of strings": not isinstance(self.stop, str),
            "stop must hold strings alone": all(isinstance(each, str) for each in self.stop),
            "numbers of tokens and samples, top_k and seed must be whole": all(isinstance(n, Integral) for n in whole),
            "max_new_tokens must be >= 1": self.max_new_tokens >= 1,
            "min_new_tokens must lie between 0 and max_new_tokens": 0 <= self.min_new_tokens <= self.max_new_tokens,
            f"temperature must be 0, or {COLDEST:g} at least, and finite": self.temperature == 0
            or COLDEST <= self.temperature < inf,
            "top_k must be >= 0": self.top_k >= 0,
            "top_p must lie in (0, 1]": 0 < self.top_p <= 1,
            "min_p must lie in [0, 1)": 0 <= self.min_p < 1,
            "repetition_penalty must be > 0": self.repetition_penalty > 0,
            "stop strings must not be empty": all(self.stop),
            "samples_per_prompt must be >= 1": self.samples_per_prompt >= 1,
        }
        for rule, holds in checks.items():
            if not holds:
                raise ValueError(f"{rule}, got {self}")

    def to_dict(self) -> dict[str, Any]:
        """All settings, for manifests."""
        return asdict(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def stream_key(seed: int, sample_id: str) -> int:
    """Of a sample's random stream."""
    digest = hashlib.sha256(f"{seed}\0{sample_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:16], "little")


def waiting_times(key: int, step: int, count: int) -> np.ndarray:
    """Exponential numbers of mean 1, above 0, [count] float32: each a function of (key, step) alone."""
    generator = np.random.Generator(np.random.Philox(key=key, counter=step << 128))
    return np.maximum(-np.log1p(-generator.random(count)), np.finfo(np.float32).tiny).astype(np.float32)


class Sampler:
    """Chooses the next token of rows that come and go; each has a seat while it runs."""

    def __init__(
        self, sampling: Sampling, eos_ids: Sequence[int], vocab: int, seats: int, device: torch.device
    ) -> None:
        self._sampling, self._device = sampling, device
        within = [token for token in eos_ids if token < vocab]  # a tokenizer may name more than a model has
        self._eos = torch.tensor(within, dtype=torch.long, device=device)
        self._keys = [0] * seats  # of their samples' random streams
        self._seen: Tensor | None = None  # [seats, vocab], tokens of the prompt and the generation so far
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(seats, vocab, dtype=torch.bool, device=device)

    def enter(self, seat: int, prompt: Sequence[int], sample_id: str) -> None:
        """Make a seat that of another sample."""
        self._keys[seat] = stream_key(self._sampling.seed, sample_id)
        if self._seen is not None:
            self._seen[seat] = False
            self._seen[seat, torch.tensor(prompt, device=self._device)] = True

    def choose(self, logits: Tensor, seats: Sequence[int], steps: Sequence[int]) -> Tensor:
        """Tokens [B] of rows in these seats, which have generated so many before, from logits [B, vocab], which are
        overwritten; NO_TOKEN for a row in which some are not numbers.
        """
        if self._seen is not None:
            rows = torch.tensor(seats, device=self._device)
            logits, penalty = logits.float(), self._sampling.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self._seen[rows], penalised, logits)
        held = [row for row, step in enumerate(steps) if step < self._sampling.min_new_tokens]
        if held:
            logits[torch.tensor(held, device=self._device)[:, None], self._eos] = -torch.inf
        if self._sampling.is_greedy:
            tokens = _likeliest(logits)
        else:
            count = -(-logits.shape[1] // BLOCK) + BLOCK
            times = [waiting_times(self._keys[seat], step, count) for seat, step in zip(seats, steps, strict=True)]
            waiting = torch.from_numpy(np.stack(times)).to(self._device)
            tokens = _draw(logits.float() / self._sampling.temperature, waiting, self._sampling)
        if self._seen is not None:
            self._seen[rows, tokens] = True
        return tokens


def _likeliest(logits: Tensor) -> Tensor:
    """Where the largest logit of each row [B, vocab] is, [B]; the first of several. What is not a number is largest.

    On a CPU by numpy, which has vector instructions for it: of 32 rows in 0.2 ms, not 1.5 ms.
    """
    fast = logits.device.type == "cpu" and logits.dtype == torch.float32
    tokens = torch.from_numpy(logits.numpy().argmax(-1)) if fast else logits.argmax(-1)
    return tokens.masked_fill_(logits.gather(1, tokens[:, None])[:, 0].isnan(), NO_TOKEN)


def _draw(logits: Tensor, waiting: Tensor, sampling: Sampling) -> Tensor:
    """Sample tokens [B] of those left by top-k, then top-p, then min-p.

    An exponential race: of independent waiting times with rates p the shortest is that of i with probability p_i. First
    between blocks of the vocabulary, each with the sum of its tokens' rates, then between the tokens of the first. A
    last bit in the logits, which depend on the batch by as much, changes the winner only where two arrive as good as
    together. Inverting the distribution function would shift by it all of the many tokens that are hardly likely.

    Args:
        logits: [B, vocab].
        waiting: [B, blocks + BLOCK] exponential numbers of mean 1.
    """
    logits, ids = _candidates(logits, sampling)
    probabilities = logits.softmax(-1)
    if sampling.min_p:
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.amax(-1, keepdim=True), 0)
    blocks = waiting.shape[1] - BLOCK
    if ids is not None:
        probabilities = waiting.new_zeros(len(waiting), blocks * BLOCK).scatter_(1, ids, probabilities)
    elif lacking := blocks * BLOCK - probabilities.shape[1]:
        probabilities = F.pad(probabilities, (0, lacking))
    tokens = probabilities.unflatten(1, (blocks, BLOCK))
    block = (tokens.sum(-1) / waiting[:, :blocks]).argmax(-1)
    rates = tokens[torch.arange(len(tokens), device=tokens.device), block]
    drawn: Tensor = block * BLOCK + (rates / waiting[:, blocks:]).argmax(-1)
    return drawn.masked_fill_(~(rates.sum(-1) > 0), NO_TOKEN)  # all rates, or none, were numbers


def _candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Logits left by top-k and top-p (-inf for those removed), and their token ids where not in vocabulary order.

    For top-p the likeliest CANDIDATES tokens are sorted, and more where the host sees that they do not reach it.
    """
    vocab = logits.shape[1]
    if sampling.top_p == 1.0:
        if not 0 < sampling.top_k < vocab:
            return logits, None
        kept = logits.topk(sampling.top_k)
        return kept.values, kept.indices
    log_total = logits.logsumexp(-1, keepdim=True)
    width = sampling.top_k if 0 < sampling.top_k < vocab else CANDIDATES
    while True:
        top = logits.topk(min(width, vocab))
        if width == sampling.top_k:
            log_total = top.values.logsumexp(-1, keepdim=True)
        reached = (top.values - log_total).exp().cumsum(-1)
        # Keep the likeliest tokens up to and including the one that reaches top_p.
        outside = torch.cat([torch.zeros_like(reached[:, :1]), reached[:, :-1]], -1) >= sampling.top_p
        if width == sampling.top_k or width >= vocab or bool(outside[:, -1].all()):
            return top.values.masked_fill(outside, -torch.inf), top.indices
        width *= 8
