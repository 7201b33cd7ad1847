"""The newest token of each row attends to what its row keeps and its layer sees, whatever else the cache holds."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import engine
from engine import kernels
from engine.kernels import HalfOneDnnKernels, KeptRows, Kernels, OneDnnKernels
from engine.shape import AttentionKind

HEADS = [(4, 1), (4, 2), (4, 4), (9, 3)]
PLAIN = AttentionKind(0.3, None, None)


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that one core is the faster, whatever the machine."""
    monkeypatch.setattr(kernels, "RAGGED_THREADS", torch.get_num_threads())


def kept_by(tokens: Sequence[int], lengths: Sequence[int], window: int | None = None) -> KeptRows:
    return KeptRows(tokens, lengths, window, torch.device("cpu"))


def one_by_one(q: Tensor, pair: Tensor, lengths: Sequence[int], kind: AttentionKind) -> Tensor:
    """Of a token of each row of a block, [B, heads * head_dim], float64."""
    attended = []
    for row, length in enumerate(lengths):
        seen = slice(max(0, length - (kind.window or length)), length)
        keys, values = (x[row, :, seen].double().repeat_interleave(q.shape[1] // x.shape[1], 0) for x in pair)
        scores = torch.einsum("hd,hnd->hn", q[row].double(), keys) * kind.scale
        if kind.softcap is not None:
            scores = (scores / kind.softcap).tanh() * kind.softcap
        attended.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), values).flatten())
    return torch.stack(attended)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("half", [False, True])
@given(
    blocks=st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=5), min_size=1, max_size=3),
    spare=st.integers(0, 40),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([2, 8, 20, 64]),
    window=st.none() | st.integers(1, 110),
    seed=st.integers(0, 100),
)
def test_decode_attention_is_that_of_each_row_alone_and_keeps_its_token(
    softcap: float | None,
    half: bool,
    blocks: list[list[int]],
    spare: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    seed: int,
) -> None:
    draw, dtype = torch.Generator().manual_seed(seed), torch.bfloat16 if half else torch.float32
    count, kind = sum(map(len, blocks)), AttentionKind(0.3, window, softcap)
    # As in a pass: views of what a projection made, in an order that is no block's.
    qkv = torch.randn(count, heads[0] + 2 * heads[1], head_dim, generator=draw).to(dtype)
    q, k, v = qkv.split([heads[0], heads[1], heads[1]], 1)
    order = torch.randperm(count, generator=draw).tolist()
    before, wanted = [], []
    expected = torch.empty(count, heads[0] * head_dim, dtype=torch.double)
    for lengths in blocks:
        tokens, order = order[: len(lengths)], order[len(lengths) :]
        pair = torch.randn(2, len(lengths), heads[1], max(lengths) + spare, head_dim, generator=draw).to(dtype)
        after = pair.clone()
        for row, (token, length) in enumerate(zip(tokens, lengths, strict=True)):
            after[0, row, :, length - 1], after[1, row, :, length - 1] = k[token], v[token]
        expected[tokens] = one_by_one(q[tokens], after, lengths, kind)
        before.append((pair, kept_by(tokens, lengths, window)))
        wanted.append(after)
    # Torch's rounds scores too, in bfloat16; numba's just what comes out.
    exact = 1e-4 if not half else 6e-2 if softcap else 1e-2
    for each, close in ((Kernels(), 6e-2 if half else 1e-4), (HalfOneDnnKernels() if half else OneDnnKernels(), exact)):
        cached = [(pair.clone(), kept) for pair, kept in before]
        attended = each.decode_attention(q, k, v, cached, kind)
        assert attended.dtype == dtype
        torch.testing.assert_close(attended.double(), expected, rtol=close, atol=close)
        assert all(torch.equal(pair, after) for (pair, _), after in zip(cached, wanted, strict=True))


@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=9), seed=st.integers(0, 100))
def test_a_row_attends_as_it_does_alone(lengths: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    q, (k, v) = torch.randn(len(lengths), 4, 8, generator=draw), torch.randn(2, len(lengths), 2, 8, generator=draw)
    pair = torch.randn(2, len(lengths), 2, max(lengths), 8, generator=draw)
    block = (pair.clone(), kept_by(range(len(lengths)), lengths))
    together = OneDnnKernels().decode_attention(q, k, v, [block], PLAIN)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        alone = OneDnnKernels().decode_attention(
            q[own], k[own], v[own], [(pair[:, own].clone(), kept_by([0], [length]))], PLAIN
        )
        torch.testing.assert_close(alone, together[own], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_is_seen_where_it_is_and_nowhere_else(dtype: torch.dtype) -> None:
    q, (k, v) = torch.ones(3, 4, 8).to(dtype), torch.ones(2, 3, 2, 8).to(dtype)
    pair = torch.ones(2, 3, 2, 70, 8).to(dtype)
    pair[0, 0, :, 30] = torch.nan  # beyond what the first row sees
    pair[1, 1, :, 3] = torch.inf
    k[2, 0, 5] = torch.nan  # in the third row's newest key, of its first two heads
    blocks = [(pair, kept_by([0, 1, 2], [30, 60, 60]))]
    first, second, third = OneDnnKernels().decode_attention(q, k, v, blocks, PLAIN).unflatten(1, (4, 8))
    torch.testing.assert_close(first, torch.ones_like(first))
    assert second.isinf().all()
    assert third[:2].isnan().all()
    torch.testing.assert_close(third[2:], torch.ones_like(third[2:]))


@pytest.mark.parametrize("why", ["no numba", "vLLM", "many threads", "a soft cap"])
def test_torchs_attention_stands_in_and_pads(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ragged_attention", kernels._ragged_attention.__wrapped__)  # asked anew
    if why == "no numba":
        monkeypatch.setitem(sys.modules, "engine.ragged_attention", None)
        monkeypatch.delattr(engine, "ragged_attention", raising=False)
    elif why == "vLLM":
        monkeypatch.setattr(kernels, "find_spec", lambda name: ModuleSpec(name, None, origin="there"))
    elif why == "many threads":
        monkeypatch.setattr(kernels, "RAGGED_THREADS", 0)
    kind = AttentionKind(0.3, None, 20.0) if why == "a soft cap" else PLAIN
    asked: list[Tensor] = []
    monkeypatch.setattr(Kernels, "kept_attention", lambda _, q, *__: asked.append(q) or q.flatten(1))
    q, (k, v) = torch.ones(1, 4, 8), torch.ones(2, 1, 2, 8)
    ours = OneDnnKernels()
    assert ours.pads(kind)
    ours.decode_attention(q, k, v, [(torch.ones(2, 1, 2, 9, 8), kept_by([0], [5]))], kind)
    assert len(asked) == 1


@pytest.mark.parametrize("softcap", [None, 20.0])
@given(
    queries=st.integers(1, 300),
    before=st.integers(0, 40),
    heads=st.sampled_from(HEADS),
    window=st.none() | st.integers(1, 400),
    seed=st.integers(0, 100),
)
def test_prompts_of_bfloat16_numbers_attend_as_in_float32(
    softcap: float | None, queries: int, before: int, heads: tuple[int, int], window: int | None, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, heads[0], 8, generator=draw).bfloat16()
    k, v = torch.randn(2, before + queries, heads[1], 8, generator=draw).bfloat16()
    kind = AttentionKind(0.3, window, softcap)
    attended = HalfOneDnnKernels().prompt_attention(q, k, v, kind)
    assert attended.dtype == torch.bfloat16
    expected = Kernels().prompt_attention(q.float(), k.float(), v.float(), kind)
    close = 3e-2 if softcap else 1e-2
    torch.testing.assert_close(attended.float(), expected, rtol=close, atol=close)
