"""What the engine chooses for a GPU, and how it calls torch's kernels there, told without one."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from engine.engine import default_dtype
from engine.kernels.base import Kernels, kernels_for
from engine.kernels.cuda import CudaKernels
from engine.shape import AttentionKind

CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, most_q: int, most_k: int, **options: Any
) -> Tensor:
    """`varlen_attn` as Flash Attention documents it: the last query of a sequence is at its last key."""
    assert starts_q.dtype == starts_k.dtype == torch.int32
    left, right = options["window_size"]
    assert right == 0
    spans, wholes = (list(pairwise(starts.tolist())) for starts in (starts_q, starts_k))
    assert most_q == max(end - start for start, end in spans)
    assert most_k == max(end - start for start, end in wholes)
    assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
    out = torch.empty_like(q)
    for (start, end), (first_key, last_key) in zip(spans, wholes, strict=True):
        for token in range(start, end):
            own = last_key - (end - token)
            seen = slice(first_key if left < 0 else max(first_key, own - left), own + 1)
            for head in range(q.shape[1]):
                of = head // (q.shape[1] // k.shape[1])
                scores = k[seen, of].float() @ q[token, head].float() * options["scale"]
                out[token, head] = (scores.softmax(0) @ v[seen, of].float()).to(q.dtype)
    return out


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_prompts_laid_end_to_end_attend_each_to_itself(
    monkeypatch: pytest.MonkeyPatch, window: int | None, kv_heads: int
) -> None:
    """With and without a prefix that was computed before."""
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen)
    draw = torch.Generator().manual_seed(0)
    fused = torch.randn(16, 4 + 2 * kv_heads, 8, generator=draw).to(torch.bfloat16)
    q, k, v = fused.split([4, kv_heads, kv_heads], 1)
    prefix = torch.randn(2, 3, kv_heads, 8, generator=draw).to(torch.bfloat16)
    kind = AttentionKind(0.5, window)
    kernels = CudaKernels(CUDA)
    for spans in ([(0, 16)], [(0, 1), (1, 9), (9, 16)]):
        prompts = [(k[a:b], v[a:b]) for a, b in spans]
        prompts[-1] = (torch.cat([prefix[0], prompts[-1][0]]), torch.cat([prefix[1], prompts[-1][1]]))
        wide = [(keys.float(), values.float()) for keys, values in prompts]
        expected = Kernels().packed_attention(q.float(), spans, wide, kind)
        for _ in range(2):  # as in two layers
            found = kernels.packed_attention(q, spans, prompts, kind)
            torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("hopper")
def test_what_torch_has_no_kernel_for_is_left_to_the_portable_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(varlen, "varlen_attn")
    for dtype, kind in ((torch.float32, AttentionKind(0.5)), (torch.bfloat16, AttentionKind(0.5, None, 30.0))):
        x = torch.randn(5, 2, 8).to(dtype)
        ours, portable = (
            kernels.packed_attention(x, [(0, 5)], [(x, x)], kind) for kernels in (CudaKernels(CUDA), Kernels())
        )
        assert torch.equal(ours, portable)


@pytest.mark.usefixtures("hopper")
def test_a_gpu_decodes_in_static_passes_and_a_cpu_does_not() -> None:
    assert kernels_for(CUDA, torch.bfloat16).static_passes
    assert not kernels_for(torch.device("cpu"), torch.float32).static_passes


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((8, 9), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_the_default_dtype_is_one_the_device_computes_in(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert default_dtype(CUDA) == dtype
    assert default_dtype(torch.device("cpu")) == "float32"
