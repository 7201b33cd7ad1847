"""Under a schedule vLLM compiles, and what it records as graphs on GPUs is replayed as GPUs replay it.

There are no graphs on CPUs. `Recorded` stands for one: it keeps the tensors that it was recorded with, replays on these
whatever it is called with, and what it gave is gone as soon as another graph of another part runs.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import Sampling, Schedule
from engine.errors import ScheduleError
from engine.parts.unit import Unit
from tests.engine.adapters import random_adapter
from tests.engine.prompts import random_prompts

pytest.importorskip("vllm.config", exc_type=ImportError)

from vllm.compilation.counter import compilation_counter
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationConfig
from vllm.forward_context import get_forward_context
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.engine.vllm.both_engines import LAYERS, LENGTHS, VARIANTS, WIDTH, generations, pair, whole

EXAMPLES = int(os.environ.get("SKIPDECODE_VLLM_EXAMPLES", "1"))  # of schedules; vLLM starts anew for each
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


needs_compiler = pytest.mark.skipif(which("g++") is None, reason="compiling for a CPU takes a C++ compiler")


@pytest.fixture
def with_graphs(request: pytest.FixtureRequest, ahead: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU compiles as a GPU does, in pieces around attention, records each, and prepares passes ahead. Without a
    C++ compiler, unless the parameter names one of PyTorch's that takes it."""
    backend = getattr(request, "param", "eager")
    check, warm_up = CpuPlatform.check_and_update_config.__func__, CPUWorker.compile_or_warm_up_model  # type: ignore[attr-defined]

    def checked(cls: Any, config: Any) -> None:
        compilation = config.compilation_config
        kept = {name: getattr(compilation, name) for name in ("mode", "cudagraph_mode", "cudagraph_capture_sizes")}
        check(cls, config)
        for name, value in kept.items():
            setattr(compilation, name, value)
        compilation.backend = backend

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
    # It looks for operations that the CPU build lacks; PyTorch does without what it spares.
    monkeypatch.setattr(FixFunctionalizationPass, "__call__", lambda self, graph: None)
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
    assert vllm._running is not None
    assert vllm._running.ahead
    # Rows at full depth beside them run the same parts.
    assert generations(vllm, prompts, SAMPLING) == generations(own, prompts, SAMPLING)
    assert Recorded.replays.total() > replayed.total()
    vllm.close()


@pytest.mark.parametrize("family", VARIANTS)
def test_graphs_serve_any_schedule_and_batch(
    family: str,
    with_graphs: None,
    make_checkpoint: Callable[..., Path],
    schedules: Callable[..., st.SearchStrategy[Schedule]],
) -> None:
    own, vllm = pair(make_checkpoint(**VARIANTS[family]), enforce_eager=False, compilation_config=GRAPHS)

    @settings(max_examples=EXAMPLES)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        under, seats = data.draw(schedules(LAYERS, WIDTH, own.shape, own.decoder)), data.draw(st.integers(1, 64))
        prompts = random_prompts(data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=80)))
        found = sorted(vllm.generate(prompts, SAMPLING, under, seats), key=lambda each: each.index)
        assert found == generations(own, prompts, SAMPLING, under)

    run()
    vllm.close()


@needs_compiler
def test_compiled_passes_give_our_own_engines_tokens(make_checkpoint: Callable[..., Path]) -> None:
    own, vllm = pair(make_checkpoint(**VARIANTS["llama"]), enforce_eager=False)
    prompts, under = random_prompts(LENGTHS, seed=2), whole(own)
    assert generations(vllm, prompts, SAMPLING, under) == generations(own, prompts, SAMPLING, under)
    vllm.close()


@needs_compiler
@pytest.mark.parametrize("with_graphs", ["inductor"], indirect=True)
def test_what_was_compiled_is_found_again_by_what_it_runs(
    with_graphs: None, make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the schedule's path: there an adapter may be trained anew."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "compiled"))
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", "0")  # which fails on CPUs, without a schedule too
    own, vllm = pair(make_checkpoint(**VARIANTS["llama"]), enforce_eager=False, compilation_config=GRAPHS)
    prompts, first = random_prompts(LENGTHS, seed=2), whole(own)
    second = replace(first, adapter=random_adapter(own.decoder, [Unit("m", 0), Unit("a", 4)]))
    found = []
    for under in (first, first, second):
        kept = tmp_path / "schedule"
        under.write(kept)
        monkeypatch.setattr("engine.vllm.engine._kept", lambda schedule, kept=kept: kept)
        before = compilation_counter.num_aot_artifacts_loaded
        assert generations(vllm, prompts, SAMPLING, under) == generations(own, prompts, SAMPLING, under)
        assert generations(vllm, prompts, SAMPLING) == generations(own, prompts, SAMPLING)
        found.append(compilation_counter.num_aot_artifacts_loaded - before)
        vllm.close()
    at_first, everything, of_the_model = found
    assert at_first == 0 < of_the_model < everything


@pytest.mark.parametrize(
    "compilation",
    [
        {"pass_config": {"fuse_attn_quant": True}},  # graphs of whole passes
        {"splitting_ops": list(CompilationConfig._attention_ops)},  # with what is written to the cache
    ],
)
def test_graphs_that_would_freeze_who_runs_a_layer_are_refused(
    compilation: dict[str, Any], with_graphs: None, make_checkpoint: Callable[..., Path]
) -> None:
    own, vllm = pair(
        make_checkpoint(**VARIANTS["llama"]), enforce_eager=False, compilation_config={**GRAPHS, **compilation}
    )
    with pytest.raises(ScheduleError, match="neither attention nor what is written to its cache"):
        generations(vllm, random_prompts(LENGTHS), SAMPLING, whole(own))
