"""The newest token of each row attends to what its row keeps and its layer sees, whatever else the cache holds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine import kernels
from engine.kernels import HalfOneDnnKernels, Kernels, OneDnnKernels, Seen
from engine.shape import AttentionKind

HEADS = [(4, 1), (4, 2), (4, 4), (9, 3)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that one core is the faster, whatever the machine."""
    monkeypatch.setattr(kernels, "RAGGED_THREADS", torch.get_num_threads())


def row_by_row(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], kind: AttentionKind) -> Tensor:
    """[B, heads * head_dim], float64."""
    attended = []
    for row, length in enumerate(lengths):
        seen = slice(max(0, length - (kind.window or length)), length)
        keys, values = (x[row, :, seen].double().repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (k, v))
        scores = torch.einsum("hd,hnd->hn", q[row].double(), keys) * kind.scale
        if kind.softcap is not None:
            scores = (scores / kind.softcap).tanh() * kind.softcap
        attended.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), values).flatten())
    return torch.stack(attended)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("half", [False, True])
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=9),
    spare=st.integers(0, 40),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([2, 8, 20, 64]),
    window=st.none() | st.integers(1, 110),
    seed=st.integers(0, 100),
)
def test_decode_attention_is_that_of_each_row_alone(
    softcap: float | None,
    half: bool,
    lengths: list[int],
    spare: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if half else torch.float32
    q = torch.randn(len(lengths), heads[0], head_dim, generator=draw).to(dtype)
    k, v = torch.randn(2, len(lengths), heads[1], max(lengths) + spare, head_dim, generator=draw).to(dtype)
    kind = AttentionKind(scale=0.3, window=window, softcap=softcap)
    expected = row_by_row(q, k, v, lengths, kind)
    # Torch's rounds scores too, in bfloat16; numba's just what comes out.
    exact = 1e-4 if not half else 6e-2 if softcap else 1e-2
    for each, close in ((Kernels(), 6e-2 if half else 1e-4), (HalfOneDnnKernels() if half else OneDnnKernels(), exact)):
        attended = each.decode_attention(q, k, v, Seen(lengths, window, CPU), kind)
        assert attended.dtype == dtype
        torch.testing.assert_close(attended.double(), expected, rtol=close, atol=close)


@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=9), seed=st.integers(0, 100))
def test_a_row_attends_bit_by_bit_as_it_does_alone(lengths: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    q, kind = torch.randn(len(lengths), 4, 8, generator=draw), AttentionKind(0.3, None, None)
    k, v = torch.randn(2, len(lengths), 2, max(lengths), 8, generator=draw)
    together = OneDnnKernels().decode_attention(q, k, v, Seen(lengths, None, CPU), kind)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = OneDnnKernels().decode_attention(q[one], k[one], v[one], Seen([length], None, CPU), kind)
        torch.testing.assert_close(alone, together[one], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_is_seen_where_it_is_and_nowhere_else(dtype: torch.dtype) -> None:
    q, (k, v) = torch.ones(3, 4, 8).to(dtype), torch.ones(2, 3, 2, 70, 8).to(dtype)
    k[0, :, 30], v[1, :, 3] = torch.nan, torch.inf  # unseen by the first row, in its slots; seen by the second
    k[2, 0, 5, 0] = torch.nan
    attended = OneDnnKernels().decode_attention(q, k, v, Seen([30, 60, 60], None, CPU), AttentionKind(0.3, None, None))
    first, second, third = attended.unflatten(1, (4, 8))
    torch.testing.assert_close(first, torch.ones_like(first))
    assert second.isinf().all()
    assert third[:2].isnan().all()
    torch.testing.assert_close(third[2:], torch.ones_like(third[2:]))


@pytest.mark.parametrize("why", ["no numba", "many threads"])
def test_torchs_attention_stands_in(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no numba":
        monkeypatch.setattr(kernels, "_ragged_attention", lambda: None)
    else:
        monkeypatch.setattr(kernels, "RAGGED_THREADS", 0)
    asked: list[Tensor] = []
    monkeypatch.setattr(Kernels, "decode_attention", lambda _, q, *__: asked.append(q))
    q, (k, v) = torch.ones(1, 4, 8), torch.ones(2, 1, 2, 9, 8)
    OneDnnKernels().decode_attention(q, k, v, Seen([5], None, CPU), AttentionKind(0.3, None, None))
    assert asked == [q]


@pytest.mark.parametrize("softcap", [None, 20.0])
@given(
    queries=st.integers(1, 300),
    before=st.integers(0, 40),
    heads=st.sampled_from(HEADS),
    window=st.none() | st.integers(1, 400),
    seed=st.integers(0, 100),
)
def test_prompts_attend_by_products_of_bfloat16_numbers_as_in_float32(
    softcap: float | None, queries: int, before: int, heads: tuple[int, int], window: int | None, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, heads[0], 8, generator=draw).bfloat16()
    k, v = torch.randn(2, before + queries, heads[1], 8, generator=draw).bfloat16()
    kind = AttentionKind(scale=0.3, window=window, softcap=softcap)
    attended = HalfOneDnnKernels().prompt_attention(q, k, v, kind)
    assert attended.dtype == torch.bfloat16
    expected = Kernels().prompt_attention(q.float(), k.float(), v.float(), kind)
    torch.testing.assert_close(attended.float(), expected, rtol=3e-2, atol=3e-2)
