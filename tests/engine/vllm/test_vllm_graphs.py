"""Under a schedule vLLM compiles, and what it records as graphs on GPUs is replayed as GPUs replay it.

There are no graphs on CPUs. `Recorded` stands for one: it keeps the tensors that it was recorded with, replays on these
whatever it is called with, and what it gave is gone as soon as another graph of another part runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from engine import Sampling
from engine.errors import ScheduleError
from tests.engine.prompts import random_prompts

pytest.importorskip("vllm.config", exc_type=ImportError)

from vllm.forward_context import get_forward_context
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.engine.vllm.both_engines import LENGTHS, VARIANTS, generations, pair, schedule, whole

SAMPLING = Sampling(max_new_tokens=14)
SIZES = [1, 2, 4, 8, 16]  # tokens that graphs are recorded of; passes take up to 48
GRAPHS = {"cudagraph_capture_sizes": SIZES}


class Recorded:
    """In place of vLLM's wrapper around a part of a model that CUDA records."""

    recording: ClassVar[bool] = False
    replays: ClassVar[Counter[int]] = Counter()  # by number of tokens
    _given: ClassVar[list[Tensor]] = []  # what parts gave whose memory the next graph takes

    def __init__(self, runnable: Any, vllm_config: Any, runtime_mode: Any, cudagraph_options: Any = None) -> None:
        self._runnable, self._mode = runnable, runtime_mode
        self._is_last = cudagraph_options is not None and cudagraph_options.weak_ref_output
        self._kept: dict[Any, tuple[tuple[Any, ...], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self._mode:
            return self._runnable(*args)
        for tensor in self._given:
            tensor.fill_(torch.nan)
        self._given.clear()
        size = context.batch_descriptor.num_tokens
        if size not in self._kept:
            assert self.recording, f"a graph of {size} tokens is recorded while rows wait"
            self._kept[size] = (args, self._runnable(*args))
        else:
            recorded, kept = self._kept[size]
            assert [_place(each) for each in args] == [_place(each) for each in recorded]
            for place, new in zip(_tensors(kept), _tensors(self._runnable(*recorded)), strict=True):
                place.copy_(new)
            self.replays[size] += 1
        kept = self._kept[size][1]
        if self._is_last:
            self._given.extend(_tensors(kept))
        return kept


def _place(value: Any) -> Any:
    """Where a tensor is and how it lies; what else it is."""
    return (value.data_ptr(), value.shape, value.stride()) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU compiles as a GPU does, in pieces around attention, and records each."""
    check, warm_up = CpuPlatform.check_and_update_config.__func__, CPUWorker.compile_or_warm_up_model  # type: ignore[attr-defined]

    def checked(cls: Any, config: Any) -> None:
        compilation = config.compilation_config
        kept = {name: getattr(compilation, name) for name in ("mode", "cudagraph_mode", "cudagraph_capture_sizes")}
        check(cls, config)
        for name, value in kept.items():
            setattr(compilation, name, value)
        compilation.backend = "eager"  # no C++ compiler

    def warmed_up(worker: Any) -> Any:
        monkeypatch.setattr(Recorded, "recording", True)
        for mode, batches in worker.model_runner.cudagraph_dispatcher.get_capture_descs():
            for batch in batches:
                worker.model_runner._dummy_run(batch.num_tokens, cudagraph_runtime_mode=mode)
        monkeypatch.setattr(Recorded, "recording", False)
        return warm_up(worker)

    monkeypatch.setattr(CpuPlatform, "support_static_graph_mode", classmethod(lambda cls: True))
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))
    monkeypatch.setattr(CpuPlatform, "get_static_graph_wrapper_cls", classmethod(lambda cls: f"{__name__}.Recorded"))
    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", warmed_up)
    Recorded.replays.clear()


@pytest.mark.parametrize("family", VARIANTS)
def test_graphs_that_are_replayed_give_our_own_engines_tokens(
    family: str, with_graphs: None, make_checkpoint: Callable[..., Path]
) -> None:
    own, vllm = pair(make_checkpoint(**VARIANTS[family]), enforce_eager=False, compilation_config=GRAPHS)
    prompts, under = random_prompts(LENGTHS, seed=1), whole(own)
    assert generations(vllm, prompts, SAMPLING, under) == generations(own, prompts, SAMPLING, under)
    replayed = Recorded.replays.copy()
    assert replayed.keys() >= {1, 2, 4, 8}
    # Rows at full depth beside them run the same parts.
    assert generations(vllm, prompts, SAMPLING) == generations(own, prompts, SAMPLING)
    assert Recorded.replays.total() > replayed.total()
    vllm.close()


@pytest.mark.skipif(which("g++") is None, reason="compiling for a CPU takes a C++ compiler")
def test_compiled_passes_give_our_own_engines_tokens(make_checkpoint: Callable[..., Path]) -> None:
    own, vllm = pair(make_checkpoint(**VARIANTS["llama"]), enforce_eager=False)
    prompts = random_prompts(LENGTHS, seed=2)
    for under in (schedule(), whole(own), None):
        assert generations(vllm, prompts, SAMPLING, under) == generations(own, prompts, SAMPLING, under)
    vllm.close()


def test_graphs_of_whole_passes_are_refused(with_graphs: None, make_checkpoint: Callable[..., Path]) -> None:
    """They would have it frozen which tokens run a layer."""
    fused: dict[str, Any] = {**GRAPHS, "pass_config": {"fuse_attn_quant": True}}
    own, vllm = pair(make_checkpoint(**VARIANTS["llama"]), enforce_eager=False, compilation_config=fused)
    with pytest.raises(ScheduleError, match="graphs of parts of a pass alone"):
        generations(vllm, random_prompts(LENGTHS), SAMPLING, whole(own))
