"""What lies between two matrix products of a layer, each in one pass over memory, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _rotate(x, factors, out, x_token, x_head, heads, half: tl.constexpr, HALF: tl.constexpr):  # noqa: N803
    token = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    pair = tl.arange(0, HALF)
    held = pair < half
    source = x + token * x_token + head * x_head + 2 * pair
    left, right = tl.load(source, mask=held).to(tl.float32), tl.load(source + 1, mask=held).to(tl.float32)
    place = factors + token * 2 * half + 2 * pair
    cosine, sine = tl.load(place, mask=held), tl.load(place + 1, mask=held)
    target = out + tl.program_id(0).to(tl.int64) * 2 * half + 2 * pair
    tl.store(target, (left * cosine - right * sine).to(out.dtype.element_ty), mask=held)
    tl.store(target + 1, (left * sine + right * cosine).to(out.dtype.element_ty), mask=held)


@triton.jit
def _silu_gate(gate_up, out, width, BLOCK: tl.constexpr):  # noqa: N803
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    gate = tl.load(gate_up + token * 2 * width + column, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + column, mask=held, other=0.0).to(tl.float32)
    # Rounded in between, as two operations of torch would.
    opened = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * width + column, (opened * up).to(out.dtype.element_ty), mask=held)


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """As `Kernels.rotate`; only x's last dimension needs to be contiguous."""
    tokens, heads, head_dim = x.shape
    out = x.new_empty(tokens, heads, head_dim)
    half = head_dim // 2
    _rotate[(tokens * heads,)](
        x,
        torch.view_as_real(factors).contiguous(),
        out,
        *x.stride()[:2],
        heads,
        half=half,
        HALF=triton.next_power_of_2(half),
        num_warps=1,
    )
    return out


def silu_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [N, width], for gate and up side by side, [N, 2 * width]."""
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    _silu_gate[(tokens, triton.cdiv(width, BLOCK))](gate_up.contiguous(), out, width, BLOCK=BLOCK)
    return out
