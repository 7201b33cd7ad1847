"""Segments: units that the same rows of any pass run. vLLM compiles each by itself, and on GPUs records its graphs.

Which tokens run a layer changes from pass to pass, so it is decided between segments; what is compiled, or recorded for
a number of tokens, has no branch.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from engine.parts.unit import Unit

UnitRun = Callable[[Unit, Tensor, Tensor], Tensor]  # a unit, positions [n], hidden states [n, hidden] -> those after it


class SegmentRun(nn.Module):
    """Hidden states [n, hidden] of tokens at positions [n] after units."""

    def __init__(self, *, run: UnitRun, units: Sequence[Unit], vllm_config: VllmConfig) -> None:
        super().__init__()
        self._run, self._units = run, units

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        for unit in self._units:
            x = self._run(unit, positions, x)
        return x


def compiled(
    run: UnitRun, units: Sequence[Unit], kind: str, depends_on: Iterable[Unit], config: VllmConfig
) -> SegmentRun:
    """What takes tokens through units, compiled at its first call if vLLM compiles at all.

    A class and a code of its own for each: by these, and not by what a module holds, vLLM and PyTorch know what they
    have compiled already, in this process and in caches on disk. So its name says all that `run` looks at but weights:
    of which kind it is, and further units that it depends on.
    """
    said = f"{' '.join(map(str, units))}; {' '.join(map(str, depends_on))}"
    name = f"{kind}_{units[0]}_{units[-1]}_{hashlib.sha256(said.encode()).hexdigest()[:12]}"
    code = SegmentRun.forward.__code__.replace(co_name=name)
    forward = FunctionType(code, SegmentRun.forward.__globals__, name)
    forward.__qualname__ = f"{SegmentRun.__qualname__}.{name}"
    own = support_torch_compile(dynamic_arg_dims={"positions": 0, "x": 0})(
        type(name, (SegmentRun,), {"forward": forward})
    )
    with set_model_tag(name):
        module: SegmentRun = own(run=run, units=tuple(units), vllm_config=config)
    return module


class Graphs:
    """Calls segments so that vLLM's recorded graphs serve: for a number of tokens that it has recorded one of, and at
    the addresses that it was recorded at. Where vLLM records none, calls pass through."""

    def __init__(self, config: VllmConfig, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """For hidden states of a width."""
        # The graph for a number of tokens, if there is one: the runner's, before its first pass.
        self.dispatch: Callable[[int], tuple[CUDAGraphMode, Any]] = lambda tokens: (CUDAGraphMode.NONE, None)
        compilation = config.compilation_config
        most = (compilation.max_cudagraph_capture_size or 0) if compilation.cudagraph_mode else 0
        self._x = torch.zeros(most, width, dtype=dtype, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)

    def padded(self, slots: Tensor) -> Tensor:
        """Slots [n] of the cache for tokens of one call, and none for what runs behind them."""
        mode, batch = self.dispatch(len(slots))
        if mode == CUDAGraphMode.NONE:
            return slots
        return pad(slots, (0, batch.num_tokens - len(slots)), value=PAD_SLOT_ID)

    def call(self, segment: SegmentRun, positions: Tensor, x: Tensor, attention: dict[str, Any]) -> Tensor:
        """Hidden states [n, hidden] after a segment.

        Args:
            segment: as `compiled` gives it.
            positions, x: of n tokens.
            attention: what vLLM's context of the pass says differently of these tokens.
        """
        context = get_forward_context()
        if context.attn_metadata is None:  # a dummy pass, or one that records
            mode, batch = context.cudagraph_runtime_mode, context.batch_descriptor
        else:
            mode, batch = self.dispatch(len(x))
        changed = replace(context, cudagraph_runtime_mode=mode, batch_descriptor=batch, **attention)
        with override_forward_context(changed):
            if mode == CUDAGraphMode.NONE:
                return segment(positions, x)  # type: ignore[no-any-return]
            n, padded = len(x), batch.num_tokens  # what stands behind them runs too, and is seen by no one
            self._x[:n].copy_(x)
            self._x[n:padded].zero_()
            self._positions[:n].copy_(positions)
            # Of memory that the next graph writes to.
            return segment(self._positions[:padded], self._x[:padded])[:n].clone()  # type: ignore[no-any-return]
