"""Kernels for CUDA: variable-length attention for prompts, a split attention kernel for decoding in graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.activations import Activation
from engine.kernels.base import Kernels
from engine.shape import AttentionKind

PROGRAMS_PER_PROCESSOR = 4  # of the decode attention: a few on each hide each other's waiting for memory
WIDEST_FLASH_HEAD = 256


class CudaKernels(Kernels):
    """Torch's own kernels where they fit, plain torch where not. Without Triton decoding reads whole cache rows."""

    static_passes = True

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._has_flash = properties.major >= 8
        self._has_triton = properties.major >= 7 and importlib.util.find_spec("triton") is not None
        self._programs = PROGRAMS_PER_PROCESSOR * properties.multi_processor_count
        self._spans: object = None  # of the pass whose `_starts` are known

    def rotate(self, x: Tensor, factors: Tensor) -> Tensor:
        """As above, in one kernel."""
        if not self._has_triton:
            return super().rotate(x, factors)
        from engine.kernels.triton_elementwise import rotate

        return rotate(x, factors)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """As above, in one kernel for the activation that most models have."""
        if not self._has_triton or activation is not F.silu:
            return super().gate(gate_up, activation)
        from engine.kernels.triton_elementwise import silu_gate

        return silu_gate(gate_up)

    def packed_attention(
        self,
        q: Tensor,
        spans: Sequence[tuple[int, int]],
        prompts: Sequence[tuple[Tensor, Tensor]],
        kind: AttentionKind,
    ) -> Tensor:
        """One call for all prompts, in half precision and without soft caps."""
        half = q.dtype in (torch.float16, torch.bfloat16)
        if not self._has_flash or not half or kind.softcap is not None or q.shape[2] > WIDEST_FLASH_HEAD:
            return super().packed_attention(q, spans, prompts, kind)
        from torch.nn.attention.varlen import varlen_attn

        k, v = (torch.cat(parts) for parts in zip(*prompts, strict=True))
        queries = [end - start for start, end in spans]
        lengths = [len(keys) for keys, _ in prompts]
        left = -1 if kind.window is None else kind.window - 1  # tokens before its own that a token sees; -1: all
        out = varlen_attn(
            *(q, k, v, *self._bounds(spans, queries, lengths, q.device), max(queries), max(lengths)),
            scale=kind.scale,
            window_size=(left, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(out, Tensor)
        return out.flatten(1)

    def append_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, pair: Tensor, lengths: Tensor, kind: AttentionKind
    ) -> Tensor:
        """As above; reads what each row holds and nothing else."""
        if not self._has_triton:
            return super().append_and_attend(q, k, v, pair, lengths, kind)
        from engine.kernels.triton_attention import append_and_attend

        return append_and_attend(q, k, v, pair, lengths, kind, self._programs)

    def _bounds(self, spans: object, queries: list[int], lengths: list[int], device: torch.device) -> Tensor:
        """Where each prompt's queries begin and where its keys do, ends included: int32 [2, P + 1].

        Kept for the other layers of the pass, lest each waits for a copy from the host.
        """
        if self._spans is not spans:
            starts = [list(accumulate(counts, initial=0)) for counts in (queries, lengths)]
            self._spans, self._starts = spans, torch.tensor(starts, dtype=torch.int32, device=device)
        return self._starts
