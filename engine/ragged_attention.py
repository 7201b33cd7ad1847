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
    _, kv_heads, slots, head_dim = keys.shape
    group, row_bytes = q.shape[1] // kv_heads, head_dim * keys.itemsize
    for row, token_of in enumerate(tokens):
        for kv_head in range(kv_heads):
            keys[row, kv_head, end[row] - 1] = k[token_of, kv_head]
            start = keys.ctypes.data + (row * kv_heads + kv_head) * slots * row_bytes
            for head in range(kv_head * group, (kv_head + 1) * group):
                for token in range(scores.shape[2]):
                    scores[row, head, token] = -np.inf
            for token in range(first[row], end[row]):
                for line in range(0, row_bytes, _LINE):
                    _prefetch(start + (token + AHEAD) * row_bytes + line)
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
    _, kv_heads, slots, head_dim = values.shape
    group, row_bytes = out.shape[1] // kv_heads, head_dim * values.itemsize
    for row, token_of in enumerate(tokens):
        for kv_head in range(kv_heads):
            values[row, kv_head, end[row] - 1] = v[token_of, kv_head]
            start = values.ctypes.data + (row * kv_heads + kv_head) * slots * row_bytes
            own = np.zeros((group, head_dim), np.float32)
            for token in range(first[row], end[row]):
                for line in range(0, row_bytes, _LINE):
                    _prefetch(start + (token + AHEAD) * row_bytes + line)
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
