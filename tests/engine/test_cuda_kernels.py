"""What the engine chooses for a GPU, and how it calls torch's kernels there, told without one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from engine.cuda_kernels import CudaKernels
from engine.engine import default_dtype
from engine.kernels import Kernels, kernels_for
from engine.shape import AttentionKind

CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, most_q: int, most_k: int, **options: Any
) -> Tensor:
    """`varlen_attn` as its documentation has it, one sequence, head and token at a time."""
    assert starts_q.dtype == torch.int32
    assert starts_q.tolist() == starts_k.tolist()
    left, right = options["window_size"]
    assert right == 0
    bounds, out = starts_q.tolist(), torch.empty_like(q)
    assert most_q == most_k == max(b - a for a, b in itertools.pairwise(bounds))
    assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
    for start, end in itertools.pairwise(bounds):
        for token in range(start, end):
            first = start if left < 0 else max(start, token - left)
            for head in range(q.shape[1]):
                of = head // (q.shape[1] // k.shape[1])
                scores = k[first : token + 1, of].float() @ q[token, head].float() * options["scale"]
                out[token, head] = (scores.softmax(0) @ v[first : token + 1, of].float()).to(q.dtype)
    return out


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_prompts_laid_end_to_end_attend_each_to_itself(
    monkeypatch: pytest.MonkeyPatch, window: int | None, kv_heads: int
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen)
    draw = torch.Generator().manual_seed(0)
    fused = torch.randn(16, 4 + 2 * kv_heads, 8, generator=draw).to(torch.bfloat16)
    q, k, v = fused.split([4, kv_heads, kv_heads], 1)
    kind = AttentionKind(0.5, window)
    kernels = CudaKernels(CUDA)
    for spans in ([(0, 16)], [(0, 1), (1, 9), (9, 16)]):
        expected = Kernels().packed_attention(q.float(), k.float(), v.float(), spans, kind)
        for _ in range(2):  # as in two layers
            found = kernels.packed_attention(q, k, v, spans, kind)
            torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("hopper")
def test_what_torch_has_no_kernel_for_is_left_to_the_portable_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(varlen, "varlen_attn")
    x = torch.randn(5, 2, 8)
    for dtype, kind in ((torch.float32, AttentionKind(0.5)), (torch.bfloat16, AttentionKind(0.5, None, 30.0))):
        ours, portable = (
            kernels.packed_attention(*(x.to(dtype),) * 3, [(0, 5)], kind) for kernels in (CudaKernels(CUDA), Kernels())
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
