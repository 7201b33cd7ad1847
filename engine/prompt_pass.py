"""Prompts through the layers: several laid end to end in one pass, no padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.decoder import Decoder
from engine.kernels import Kernels
from engine.plan import Operation, run_plan

PROMPT_TOKENS = 2048  # of prompts in one pass: bounds its activations, and is enough to fill a GEMM

Keep = Callable[[int, int, Tensor, Tensor], None]  # layer, which prompt, its keys and values [n, kv_heads, head_dim]


def run_prompts(
    decoder: Decoder,
    kernels: Kernels,
    device: torch.device,
    prompts: Sequence[Sequence[int]],
    plan: Sequence[Operation],
    keep: Keep,
) -> Tensor:
    """Hidden states [P, hidden] of the last token of each of P prompts.

    Args:
        prompts: token ids.
        plan: what prompt tokens go through.
        keep: told of every layer's keys and values, views of what the pass computes.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = lengths.cumsum(0).tolist()
    spans = list(zip([0, *ends], ends, strict=False))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for index, (start, end) in enumerate(spans):
            keep(layer, index, k[start:end], v[start:end])
        kind = decoder.shape.attention_kind(layer)
        return torch.cat([kernels.prompt_attention(q[a:b], k[a:b], v[a:b], kind) for a, b in spans])

    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts]).to(device)
    rotations = decoder.rotations(positions, lengths.repeat_interleave(lengths).to(device))
    tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    x = run_plan(decoder, plan, {}, decoder.embed(tokens, positions), rotations, attend)
    return x[torch.tensor(ends, device=device) - 1]
