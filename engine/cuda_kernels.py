"""Kernels for CUDA: variable-length attention for prompts, a split attention kernel for decoding in graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels import Kernels
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
        self._spans: tuple[Sequence[tuple[int, int]], Tensor] = ((), torch.empty(0))

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Sequence[tuple[int, int]], kind: AttentionKind
    ) -> Tensor:
        """One call for all prompts, in half precision and without soft caps."""
        half = q.dtype in (torch.float16, torch.bfloat16)
        if not self._has_flash or not half or kind.softcap is not None or q.shape[2] > WIDEST_FLASH_HEAD:
            return super().packed_attention(q, k, v, spans, kind)
        from torch.nn.attention.varlen import varlen_attn

        longest = max(end - start for start, end in spans)
        bounds = self._bounds(spans, q.device)
        left = -1 if kind.window is None else kind.window - 1  # tokens before its own that a token sees; -1: all
        out = varlen_attn(
            *(q, k, v, bounds, bounds, longest, longest),
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
        from engine.triton_attention import append_and_attend

        return append_and_attend(q, k, v, pair, lengths, kind, self._programs)

    def _bounds(self, spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """Where each prompt begins, and the last one ends, int32 [P + 1]; kept for the other layers of the pass."""
        if self._spans[0] is not spans:
            bounds = torch.tensor([spans[0][0], *(end for _, end in spans)], dtype=torch.int32, device=device)
            self._spans = (spans, bounds)
        return self._spans[1]
