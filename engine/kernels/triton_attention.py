"""Attention of one new token per row to its own cached tokens, in Triton: split over the slots, as in Flash-Decoding.

Lengths are read on the device and no shape depends on them, so one captured graph serves every step. A program takes
one key/value head of one row, with all query heads that share it, and a share of the row's slots; a second kernel puts
the shares together. Slots beyond a row's length, or before its window, are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.shape import AttentionKind

LEAST_ROWS = 16  # of a matrix that a tensor core multiplies: fewer query heads are filled up
TILE_BYTES = 16384  # of the keys that a program holds at a time; shared memory holds a few such tiles
MOST_SPLITS = 32


@triton.jit
def _capped(scores, softcap: tl.constexpr):
    if softcap > 0:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # softcap * tanh(scores / softcap)
    return scores


@triton.jit
def _attend(
    q,
    k,
    v,
    pair,
    lengths,
    out,  # float32 [B, heads, SPLITS, head_dim] not yet divided by the sums; if SPLITS is 1, as q, divided
    maxima,  # float32 [B, heads, SPLITS]
    sums,  # float32 [B, heads, SPLITS]
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    pair_value,
    pair_row,
    pair_head,
    head_dim: tl.constexpr,
    kv_heads: tl.constexpr,
    group_size: tl.constexpr,  # query heads that share a key/value head
    window: tl.constexpr,  # 0: none
    softcap: tl.constexpr,  # 0: none
    GROUP: tl.constexpr,  # group_size filled up  # noqa: N803
    WIDTH: tl.constexpr,  # head_dim filled up  # noqa: N803
    BLOCK: tl.constexpr,  # slots at a time  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
):
    row = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)  # of the tokens before the new one
    first = tl.maximum(length + 1 - window, 0) if window > 0 else 0
    share = tl.cdiv(tl.cdiv(length - first, BLOCK), SPLITS) * BLOCK
    start = first + split * share
    end = tl.minimum(start + share, length)

    group = tl.arange(0, GROUP)
    width = tl.arange(0, WIDTH)
    wide = width < head_dim
    heads = head * group_size + group
    held = (group < group_size)[:, None] & wide[None, :]
    queries = tl.load(q + row * q_row + heads[:, None] * q_head + width[None, :], mask=held, other=0.0)
    keys_of_head = pair + row * pair_row + head * pair_head
    highest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    mixed = tl.zeros([GROUP, WIDTH], tl.float32)

    for begin in range(start, end, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        seen = slots < end
        places = keys_of_head + slots[:, None].to(tl.int64) * head_dim + width[None, :]
        keys = tl.load(places, mask=seen[:, None] & wide[None, :], other=0.0)
        values = tl.load(places + pair_value, mask=seen[:, None] & wide[None, :], other=0.0)
        scores = _capped(tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale, softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        highest = higher

    if split == 0:  # the new token itself; nobody else reads or writes its slot
        key = tl.load(k + row * k_row + head * k_head + width, mask=wide, other=0.0)
        value = tl.load(v + row * v_row + head * v_head + width, mask=wide, other=0.0)
        place = keys_of_head + length.to(tl.int64) * head_dim + width
        tl.store(place, key, mask=wide)
        tl.store(place + pair_value, value, mask=wide)
        products = queries.to(tl.float32) * key.to(tl.float32)[None, :]
        score = _capped(tl.sum(products, 1) * scale, softcap)
        higher = tl.maximum(highest, score)
        weight = tl.exp(score - higher)
        shrink = tl.exp(highest - higher)
        mixed = mixed * shrink[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
        total = total * shrink + weight
        highest = higher

    slot = (row * kv_heads * group_size + heads) * SPLITS + split
    if SPLITS == 1:
        mixed = mixed / total[:, None]
    else:
        tl.store(maxima + slot, highest, mask=group < group_size)
        tl.store(sums + slot, total, mask=group < group_size)
    tl.store(out + slot[:, None] * head_dim + width[None, :], mixed.to(out.dtype.element_ty), mask=held)


@triton.jit
def _combine(
    parts,
    maxima,
    sums,
    out,  # [B * heads, head_dim]
    head_dim: tl.constexpr,
    WIDTH: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
):
    head = tl.program_id(0).to(tl.int64)  # of any row
    splits = head * SPLITS + tl.arange(0, SPLITS)
    width = tl.arange(0, WIDTH)
    wide = width < head_dim
    highest = tl.load(maxima + splits)
    weights = tl.exp(highest - tl.max(highest, 0))  # 0 for a share without slots
    total = tl.sum(tl.load(sums + splits) * weights, 0)
    mixed = tl.load(parts + splits[:, None] * head_dim + width[None, :], mask=wide[None, :], other=0.0)
    mixed = tl.sum(mixed * weights[:, None], 0) / total
    tl.store(out + head * head_dim + width, mixed.to(out.dtype.element_ty), mask=wide)


def append_and_attend(
    q: Tensor, k: Tensor, v: Tensor, pair: Tensor, lengths: Tensor, kind: AttentionKind, programs: int
) -> Tensor:
    """As `Kernels.append_and_attend`.

    Args:
        q, k, v: only the last dimension needs to be contiguous.
        pair: contiguous in its last two dimensions.
        programs: how many the device needs to be busy. A row's slots are split until there are as many.
    """
    rows, heads, head_dim = q.shape
    kv_heads, capacity = pair.shape[2], pair.shape[3]
    width = triton.next_power_of_2(head_dim)
    block = max(16, min(128, TILE_BYTES // (width * q.element_size())))
    wanted = triton.next_power_of_2(triton.cdiv(programs, rows * kv_heads))
    splits = max(1, min(wanted, MOST_SPLITS, triton.next_power_of_2(triton.cdiv(capacity, block))))
    out = q.new_empty(rows, heads, head_dim)
    parts, maxima, sums = out, out, out
    if splits > 1:
        parts = out.new_empty(rows, heads, splits, head_dim, dtype=torch.float32)
        maxima, sums = (out.new_empty(rows, heads, splits, dtype=torch.float32) for _ in range(2))
    _attend[(rows * kv_heads, splits)](
        q,
        k,
        v,
        pair,
        lengths,
        parts,
        maxima,
        sums,
        kind.scale,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *pair.stride()[:3],
        head_dim=head_dim,
        kv_heads=kv_heads,
        group_size=heads // kv_heads,
        window=kind.window or 0,
        softcap=kind.softcap or 0.0,
        GROUP=max(LEAST_ROWS, triton.next_power_of_2(heads // kv_heads)),
        WIDTH=width,
        BLOCK=block,
        SPLITS=splits,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _combine[(rows * heads,)](parts, maxima, sums, out, head_dim=head_dim, WIDTH=width, SPLITS=splits)
    return out.view(rows, heads * head_dim)
