"""Each token of a prompt attends to the tokens before it that its layer sees, however long the prompt is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import QUERIES, Kernels, grouped_attention
from engine.shape import AttentionKind


@pytest.mark.parametrize("softcap", [None, 20.0])
@given(
    queries=st.integers(1, 2 * QUERIES + 2),
    before=st.integers(0, QUERIES + 2),
    window=st.none() | st.integers(1, 4 * QUERIES),
    seed=st.integers(0, 100),
)
def test_prompt_attention_is_that_of_each_token_alone(
    softcap: float | None, queries: int, before: int, window: int | None, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, 4, 8, generator=draw)
    k, v = torch.randn(2, before + queries, 2, 8, generator=draw)
    kind = AttentionKind(scale=0.3, window=window, softcap=softcap)
    attended = Kernels().prompt_attention(q, k, v, kind)
    assert attended.shape == (queries, 32)
    for token in {0, queries // 2, min(queries, QUERIES) - 1, min(queries - 1, QUERIES), queries - 1}:
        last = before + token + 1
        seen = slice(max(0, last - (window or last)), last)
        keys, values = (x[seen].repeat_interleave(2, 1).double() for x in (k, v))  # [seen, heads, head_dim]
        scores = torch.einsum("hd,nhd->hn", q[token].double(), keys) * kind.scale
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), values).flatten()
        torch.testing.assert_close(attended[token].double(), expected, rtol=1e-4, atol=1e-4)


@given(
    queries=st.integers(1, 40),
    before=st.integers(0, 40),
    heads=st.sampled_from([(4, 1), (4, 2), (4, 4), (6, 2)]),
    half=st.booleans(),
    seed=st.integers(0, 100),
)
def test_heads_that_share_keys_are_queries_side_by_side(
    queries: int, before: int, heads: tuple[int, int], half: bool, seed: int
) -> None:
    draw, (all_heads, kv_heads) = torch.Generator().manual_seed(seed), heads
    dtype = torch.bfloat16 if half else torch.float32
    q = torch.randn(queries, all_heads, 8, generator=draw).to(dtype)
    k, v = torch.randn(2, before + queries, kv_heads, 8, generator=draw).to(dtype)
    kind = AttentionKind(scale=0.3, window=None, softcap=None)
    seen = torch.ones(queries, before + queries, dtype=torch.bool).tril(before)
    attended = grouped_attention(q, k, v, kind, seen)
    assert attended.dtype == dtype
    expected = Kernels().prompt_attention(q.float(), k.float(), v.float(), kind)
    torch.testing.assert_close(attended.float(), expected, rtol=2e-2, atol=2e-2 if half else 1e-5)
