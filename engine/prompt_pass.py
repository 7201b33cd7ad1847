"""Prompts through the layers: several laid end to end in one pass, no padding, what they share computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.decoder import Decoder
from engine.kernels import Kernels
from engine.plan import Operation, run_plan

PROMPT_TOKENS = 2048  # of prompts in one pass: bounds its activations, and is enough to fill a GEMM

Keep = Callable[[int, int, Tensor, Tensor], None]  # layer, which prompt, its keys and values [n, kv_heads, head_dim]


@dataclass(frozen=True)
class Prefix:
    """Tokens that many prompts begin with, and what every layer keeps of them."""

    tokens: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]  # keys and values [p, kv_heads, head_dim]

    def shared(self, prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens need not be computed."""
        return shared_tokens(self.tokens, prompt)


def shared_tokens(prefix: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens a prompt takes from a prefix: all or none, and never the prompt's last one."""
    length = len(prefix)
    return length if len(prompt) > length and tuple(prompt[:length]) == tuple(prefix) else 0


def compute_prefix(
    decoder: Decoder, kernels: Kernels, device: torch.device, tokens: Sequence[int], plan: Sequence[Operation]
) -> Prefix | None:
    """A prefix of p tokens; None where it is empty, fills the context, or its keys would depend on what follows it."""
    if not 0 < len(tokens) < decoder.shape.context:
        return None
    positions = torch.arange(len(tokens), device=device)
    alone = decoder.rotations(positions, torch.full_like(positions, len(tokens)))
    longest = decoder.rotations(positions, torch.full_like(positions, decoder.shape.context))
    if not all(torch.equal(*pair) for pair in zip(alone, longest, strict=True)):
        return None
    layers: list[tuple[Tensor, Tensor]] = []
    # Copies: a view of the fused projection would keep the queries too.
    run_prompts(decoder, kernels, device, [tokens], plan, lambda _layer, _, k, v: layers.append((k.clone(), v.clone())))
    return Prefix(tuple(tokens), tuple(layers))


def run_prompts(
    decoder: Decoder,
    kernels: Kernels,
    device: torch.device,
    prompts: Sequence[Sequence[int]],
    plan: Sequence[Operation],
    keep: Keep,
    prefix: Prefix | None = None,
) -> Tensor:
    """Hidden states [P, hidden] of the last token of each of P prompts.

    Args:
        prompts: token ids.
        plan: what prompt tokens go through.
        keep: told of every layer's keys and values, views of what the pass computes.
        prefix: under the same plan; prompts that begin with it compute only their other tokens.
    """
    shared = [prefix.shared(prompt) if prefix else 0 for prompt in prompts]
    lengths = torch.tensor([len(prompt) - start for prompt, start in zip(prompts, shared, strict=True)])
    ends = lengths.cumsum(0).tolist()
    spans = list(zip([0, *ends], ends, strict=False))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = []
        for index, (start, end) in enumerate(spans):
            keys, values = k[start:end], v[start:end]
            if prefix and shared[index]:
                keys, values = (torch.cat(pair) for pair in zip(prefix.layers[layer], (keys, values), strict=True))
            keep(layer, index, keys, values)
            whole.append((keys, values))
        return kernels.packed_attention(q, spans, whole, decoder.shape.attention_kind(layer))

    positions = torch.cat([torch.arange(start, len(prompt)) for prompt, start in zip(prompts, shared, strict=True)])
    positions = positions.to(device)
    whole = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(lengths)
    rotations = decoder.rotations(positions, whole.to(device))
    computed = [token for prompt, start in zip(prompts, shared, strict=True) for token in prompt[start:]]
    x = decoder.embed(torch.tensor(computed, device=device), positions)
    x = run_plan(decoder, plan, {}, x, rotations, attend)
    return x[torch.tensor(ends, device=device) - 1]
