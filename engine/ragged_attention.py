"""Attention of single tokens, compiled by numba for the CPU it runs on: each row reads just what it keeps.

Rows that decode together have caches of all lengths in which each query meets each key once, so it is memory that they
wait for. Torch's attention pads rows to the longest, and on cores that its matrix library was not made for it takes
three times as long.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

AHEAD = 64  # tokens: so far before they are needed keys and values are asked for
_LINE = 64  # bytes of a cache line
# No numbers are taken for finite: one that is not has to be found by who chooses tokens.
_LOOSE = {"reassoc", "contract", "nsz"}


@njit(nogil=True)
def _ask_for(kept: Any, row: Any, kv_head: Any, token: Any) -> None:
    """That a token's keys or values come into the cache; beyond the last slot, what follows."""
    _, kv_heads, slots, head_dim = kept.shape
    token_bytes = head_dim * kept.itemsize
    start = kept.ctypes.data + ((row * kv_heads + kv_head) * slots + token) * token_bytes
    for line in range(0, token_bytes, _LINE):
        _prefetch(start + line)


@njit(nogil=True, fastmath=_LOOSE)
def score(q: Any, k: Any, keys: Any, tokens: Any, first: Any, end: Any, scale: Any, scores: Any) -> None:
    """Scaled products of queries with the keys that they see, -inf for others.

    Args:
        q: [N, heads, head_dim], float32.
        k: [N, kv_heads, head_dim], float32, or the bits of bfloat16 as uint16.
        keys: [B, kv_heads, slots, head_dim], of the same; each row's new key is written.
        tokens: [B], which of the N is a row's.
        first, end: [B], what a row sees, its new key last.
        scale: float32.
        scores: [B, heads, longest], written.
    """
    _, kv_heads, _, head_dim = keys.shape
    group = q.shape[1] // kv_heads
    for row, token_of in enumerate(tokens):
        for kv_head in range(kv_heads):
            for i in range(head_dim):  # slices would take a second more to compile
                keys[row, kv_head, end[row] - 1, i] = k[token_of, kv_head, i]
            for head in range(kv_head * group, (kv_head + 1) * group):
                for token in range(scores.shape[2]):
                    scores[row, head, token] = -np.inf
            for token in range(first[row], end[row]):
                _ask_for(keys, row, kv_head, token + AHEAD)
                for head in range(kv_head * group, (kv_head + 1) * group):
                    product = np.float32(0)
                    for i in range(head_dim):
                        product += q[token_of, head, i] * _wide(keys[row, kv_head, token, i])
                    scores[row, head, token] = product * scale


@njit(nogil=True, fastmath=_LOOSE)
def weigh(weights: Any, v: Any, values: Any, tokens: Any, first: Any, end: Any, out: Any) -> None:
    """Values that each row sees, weighted.

    Args:
        weights: [B, heads, longest], float32.
        v, values, tokens, first, end: as for `score`.
        out: [N, heads, head_dim], written where `tokens` says.
    """
    _, kv_heads, _, head_dim = values.shape
    group = out.shape[1] // kv_heads
    for row, token_of in enumerate(tokens):
        for kv_head in range(kv_heads):
            for i in range(head_dim):
                values[row, kv_head, end[row] - 1, i] = v[token_of, kv_head, i]
            own = np.zeros((group, head_dim), np.float32)
            for token in range(first[row], end[row]):
                _ask_for(values, row, kv_head, token + AHEAD)
                for head in range(group):
                    weight = weights[row, kv_head * group + head, token]
                    for i in range(head_dim):
                        own[head, i] += weight * _wide(values[row, kv_head, token, i])
            for head in range(group):
                for i in range(head_dim):
                    out[token_of, kv_head * group + head, i] = own[head, i]


@intrinsic
def _wide(_: Any, number: Any) -> Any:
    """A bfloat16 number's bits as float32; a float32 number as it is."""

    def code(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,), whole = arguments, ir.IntType(32)
        if signature.args[0] == types.float32:
            return value
        return builder.bitcast(builder.shl(builder.zext(value, whole), ir.Constant(whole, 16)), ir.FloatType())

    return types.float32(number), code


@intrinsic
def _prefetch(_: Any, address: Any) -> Any:
    """Ask for the cache line at an address, which may lie outside of what one owns."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer, whole = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, whole, whole, whole])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        read, keep, data = (ir.Constant(whole, number) for number in (0, 3, 1))
        builder.call(prefetch, [builder.inttoptr(arguments[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(address), code
