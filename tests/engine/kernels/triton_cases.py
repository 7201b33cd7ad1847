"""Run in a process of its own by `test_triton_kernels.py`: Triton decides at import whether it interprets.

Prints the largest difference from a float64 reference for each case, as JSON.
"""

from __future__ import annotations

import itertools
import json

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import triton_attention, triton_elementwise
from engine.kernels.base import Kernels
from engine.shape import AttentionKind

LENGTHS = [0, 1, 16, 17, 59]
CAPACITY = 60


def reference(q: Tensor, k: Tensor, v: Tensor, pair: Tensor, lengths: Tensor, kind: AttentionKind) -> Tensor:
    """One row and head at a time, in float64."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row, head in itertools.product(range(len(q)), range(q.shape[1])):
        length, ours = int(lengths[row]), head // group
        first = max(0, length + 1 - (kind.window or length + 1))
        keys, values = (
            torch.cat([pair[i, row, ours, first:length], new[row, None, ours]]).double() for i, new in ((0, k), (1, v))
        )
        scores = keys @ q[row, head].double() * kind.scale
        if kind.softcap is not None:
            scores = kind.softcap * (scores / kind.softcap).tanh()
        out[row, head] = scores.softmax(0) @ values
    return out.flatten(1)


def differences(
    heads: int, kv_heads: int, head_dim: int, kind: AttentionKind, dtype: torch.dtype, programs: int
) -> dict[str, float]:
    draw = torch.Generator().manual_seed(0)
    rows = len(LENGTHS)
    # As the engine has them: slices of one projection, and a cache with more rows than the batch.
    fused = torch.randn(rows, heads + 2 * kv_heads, head_dim, generator=draw).to(dtype)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    pair = torch.randn(2, rows + 3, kv_heads, CAPACITY, head_dim, generator=draw).to(dtype)
    lengths = torch.tensor(LENGTHS)
    for row, length in enumerate(LENGTHS):
        pair[:, row, :, length:] = torch.nan  # what no row holds must not be read
    expected, appended = reference(q, k, v, pair, lengths, kind), pair.clone()
    for row, length in enumerate(LENGTHS):
        appended[0, row, :, length], appended[1, row, :, length] = k[row], v[row]
    ours = triton_attention.append_and_attend(q, k, v, pair, lengths, kind, programs)
    portable = Kernels().append_and_attend(q, k, v, appended.nan_to_num(), lengths, kind)
    return {
        "triton": float((ours.double() - expected).abs().max()),
        "portable": float((portable.double() - expected).abs().max()),
        "cache": float((pair.double().nan_to_num(7) - appended.double().nan_to_num(7)).abs().max()),
    }


def elementwise(dtype: torch.dtype) -> dict[str, float]:
    draw = torch.Generator().manual_seed(1)
    fused = torch.randn(3, 7, 24, generator=draw).to(dtype)
    factors = torch.polar(torch.ones(3, 1, 12), torch.rand(3, 1, 12, generator=draw) * 6)
    gate_up = torch.randn(3, 2 * 1100, generator=draw).to(dtype)
    portable = Kernels()
    pairs = {
        "rotate": (triton_elementwise.rotate(fused[:, :5], factors), portable.rotate(fused[:, :5], factors)),
        "gate": (triton_elementwise.silu_gate(gate_up), portable.gate(gate_up, F.silu)),
    }
    return {
        name: float(((ours.float() - theirs.float()) / (1 + theirs.float().abs())).abs().max())
        for name, (ours, theirs) in pairs.items()
    }


def main() -> None:
    triton_attention.TILE_BYTES = 1024  # small blocks: several in every share
    kinds = [AttentionKind(0.3, window, cap) for window in (None, 1, 20) for cap in (None, 5.0)]
    shapes = itertools.cycle([(4, 4, 32), (6, 2, 16), (8, 1, 24)])
    found = {}
    for kind, (heads, kv_heads, head_dim) in zip(kinds, shapes, strict=False):
        # Not bfloat16: the interpreter multiplies the bits of its numbers as if they were integers.
        for dtype, programs in ((torch.float32, 1), (torch.float32, 32), (torch.float16, 32)):
            name = f"{heads}/{kv_heads} heads of {head_dim}, {kind}, {dtype}, {programs} programs"
            found[name] = differences(heads, kv_heads, head_dim, kind, dtype, programs)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found[f"elementwise, {dtype}"] = elementwise(dtype)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
