"""What vLLM cannot do under a schedule is refused by name, before it runs; what it would choose wrongly is set."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, Sampling, Schedule
from engine.errors import ModelError, ScheduleError
from tests.engine.conftest import random_prompt_bridge
from tests.engine.prompts import random_prompts

pytest.importorskip("vllm.config", exc_type=ImportError)

from vllm import EngineArgs, SamplingParams
from vllm.config.offload import PrefetchOffloadConfig, UVAOffloadConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.input_processor import InputProcessor

from engine.vllm.engine import VllmEngine, _kept
from engine.vllm.plugin import FULL_DEPTH, SETTING, SHARED, apply, register, shared_of
from tests.engine.vllm.both_engines import VARIANTS, generations, in_vllm, schedule, whole


@pytest.fixture(scope="module")
def llama(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(**VARIANTS["llama"])


@pytest.fixture
def config(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that vLLM has made, before a schedule is applied to it: one with an adapter and a prompt bridge."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    register()
    whole(Engine.load(str(llama), device="cpu")).write(tmp_path / "whole")
    made = EngineArgs(str(llama), skip_tokenizer_init=True, dtype="float32", max_model_len=160).create_engine_config()
    made.additional_config = {SETTING: str(tmp_path / "whole")}
    return made


@pytest.mark.parametrize(
    ("part", "name", "value", "what"),
    [
        ("cache_config", "kv_offloading_size", 1.0, "a cache offloaded to the host"),
        ("offload_config", "offload_backend", "prefetch", "weights prefetched from the host"),
        ("offload_config", "prefetch", PrefetchOffloadConfig(offload_group_size=8), "weights prefetched from the host"),
        ("model_config", "enable_sleep_mode", True, "sleep mode"),
        ("scheduler_config", "policy", "priority", "priorities"),
        ("model_config", "runner_type", "pooling", "pooling"),
        ("parallel_config", "tensor_parallel_size", 2, "a prompt bridge and tensor parallelism"),
        ("load_config", "load_format", "dummy", "an adapter and load format dummy"),
        ("load_config", "load_format", "sharded_state", "an adapter and load format sharded_state"),
    ],
)
def test_a_feature_that_would_spoil_a_schedule_is_refused_by_name(
    config: Any, part: str, name: str, value: object, what: str
) -> None:
    setattr(getattr(config, part), name, value)
    with pytest.raises(ScheduleError, match=f"does not run together with {what}"):
        apply(config)


def test_a_schedule_is_refused_where_vllm_runs_its_second_model_runner(config: Any) -> None:
    config.watermark_config = object()
    with pytest.raises(ScheduleError, match="set VLLM_USE_V2_MODEL_RUNNER=0 before vLLM starts, and no watermark"):
        apply(config)


def test_vllm_starts_with_its_first_model_runner_at_full_depth_too(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    VllmEngine(str(llama), "float32", "cpu")
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


@pytest.mark.parametrize(
    ("capability", "dtype", "cache", "backend"),
    [
        (100, torch.bfloat16, "auto", "FLASH_ATTN"),
        (90, torch.bfloat16, "fp8", "TRITON_ATTN"),
        (90, torch.float32, "auto", "TRITON_ATTN"),
        (75, torch.float16, "auto", "TRITON_ATTN"),
    ],
)
def test_on_cuda_attention_takes_rows_in_any_order(
    config: Any, monkeypatch: pytest.MonkeyPatch, capability: int, dtype: torch.dtype, cache: str, backend: str
) -> None:
    config.model_config.dtype, config.cache_config.cache_dtype = dtype, cache
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: True)
    monkeypatch.setattr(type(current_platform), "has_device_capability", lambda _, least: capability >= least)
    apply(config)
    assert config.attention_config.backend == AttentionBackendEnum[backend]


def test_on_rocm_attention_takes_rows_in_any_order(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: True)
    apply(config)
    assert config.attention_config.backend == AttentionBackendEnum.TRITON_ATTN


def test_on_cuda_an_attention_backend_of_your_own_stays(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: True)
    config.attention_config.backend = AttentionBackendEnum.FLASH_ATTN  # for float32 it would choose Triton's
    apply(config)
    assert config.attention_config.backend == AttentionBackendEnum.FLASH_ATTN


def test_an_attention_backend_that_has_not_been_proven_is_refused(config: Any) -> None:
    config.attention_config.backend = AttentionBackendEnum.FLEX_ATTENTION
    with pytest.raises(ScheduleError, match="does not run with attention backend FLEX_ATTENTION, but with FLASH_ATTN"):
        apply(config)


def test_weights_that_a_layers_call_would_fetch_are_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    config.offload_config.uva = UVAOffloadConfig(cpu_offload_gb=1)
    with pytest.raises(ScheduleError, match="does not run together with weights offloaded to the host without UVA"):
        apply(config)


def test_an_attention_backend_of_one_kind_of_layers_is_held_to_the_same(config: Any) -> None:
    config.attention_config.backend_per_kind = {"sliding_window": AttentionBackendEnum.FLASHINFER}
    with pytest.raises(ScheduleError, match="does not run with attention backend FLASHINFER"):
        apply(config)


def test_vllms_front_end_in_rust_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ScheduleError, match="does not run together with vLLM's front end in Rust"):
        apply(config)


def test_requests_have_no_seed_on_cpus(config: Any, tmp_path: Path) -> None:
    seeded = SamplingParams(temperature=0.7, seed=1)
    with pytest.raises(VLLMValidationError, match="under a schedule requests have no seed on CPUs"):
        admit(config, schedule(), tmp_path / "plain", seeded)
    admit(config, None, tmp_path, seeded)


def admit(
    config: Any, under: Schedule | None, folder: Path, params: SamplingParams, shared: int = 0, **how: Any
) -> Any:
    """A request, under a schedule whose directory is gone by then."""
    config.additional_config = {}
    if under is not None:
        under.write(folder)
        config.additional_config = {SETTING: str(folder), SHARED: shared}
    processor = InputProcessor(config)
    config.additional_config = {}
    prompt = {"type": "token", "prompt_token_ids": [5, 6, 7]}
    return processor.process_inputs("0", prompt, params, ("generate",), **how)


def test_prompts_have_log_probabilities_but_under_a_prompt_bridge(config: Any, llama: Path, tmp_path: Path) -> None:
    asked, plain = SamplingParams(prompt_logprobs=0), SamplingParams(logprobs=0)
    shape = Engine.load(str(llama), device="cpu").shape
    bridged = replace(schedule(), prompt_bridge=random_prompt_bridge(shape, 3))
    with pytest.raises(VLLMValidationError, match="under a prompt bridge prompts have no log-probabilities"):
        admit(config, bridged, tmp_path / "bridged", asked)
    admit(config, bridged, tmp_path / "bridged", plain)
    admit(config, bridged, tmp_path / "bridged", SamplingParams(prompt_logprobs=0, extra_args={FULL_DEPTH: True}))
    admit(config, schedule(), tmp_path / "plain", asked)
    admit(config, None, tmp_path, asked)


def test_what_prompts_share_is_a_number_of_tokens(config: Any, tmp_path: Path) -> None:
    config.additional_config[SHARED] = "Summarize this"
    with pytest.raises(ScheduleError, match="skipdecode_shared_tokens is a number of tokens, not 'Summarize this'"):
        apply(config)
    with pytest.raises(VLLMValidationError, match="skipdecode_shared_tokens is a number of tokens"):
        admit(config, schedule(), tmp_path / "plain", SamplingParams(extra_args={SHARED: -1}))


def test_prompts_whose_first_tokens_run_otherwise_find_no_blocks_of_each_others(
    config: Any, llama: Path, tmp_path: Path
) -> None:
    under = whole(Engine.load(str(llama), device="cpu"))

    def request(**extra: Any) -> Any:
        return admit(config, under, tmp_path / "under", SamplingParams(extra_args=extra), shared=1)

    requests = [request(**{SHARED: 0}), request(), request(**{SHARED: 9}), request(**{FULL_DEPTH: True})]
    assert [shared_of(each.sampling_params) for each in requests[:3]] == [0, 1, 2]  # never a prompt's last one
    assert requests[0].cache_salt is None
    assert len({each.cache_salt for each in requests}) == len(requests)
    # Where prompts are as at full depth it does not matter.
    plain = SamplingParams(extra_args={FULL_DEPTH: True, SHARED: 200})
    admitted = admit(config, schedule(), tmp_path / "plain", plain, shared=1)
    assert admitted.cache_salt is None
    assert shared_of(admitted.sampling_params) == 0


def test_streaming_input_is_refused_under_a_schedule(config: Any, tmp_path: Path) -> None:
    with pytest.raises(VLLMValidationError, match="does not run together with streaming input"):
        admit(config, schedule(), tmp_path / "plain", SamplingParams(), resumable=True)
    admit(config, None, tmp_path, SamplingParams(), resumable=True)


def test_full_depth_is_asked_for_by_a_truth_and_nothing_like_it(config: Any, tmp_path: Path) -> None:
    for asked in ("false", "true", 2):
        with pytest.raises(VLLMValidationError, match=f"{FULL_DEPTH} is true or false"):
            admit(config, schedule(), tmp_path / "plain", SamplingParams(extra_args={FULL_DEPTH: asked}))
    for asked in (True, False, 0, 1):
        admit(config, schedule(), tmp_path / "plain", SamplingParams(extra_args={FULL_DEPTH: asked}))


def test_models_that_vllm_computes_otherwise_are_refused(make_checkpoint: Callable[..., Path]) -> None:
    for family in ("qwen3", "mistral, sliding window"):
        with pytest.raises(ModelError, match=r"vLLM leaves out biases of attention .*: use --engine torch"):
            in_vllm(make_checkpoint(**VARIANTS[family], attention_bias=True))
    factors = [1.0 + part for part in range(16)]
    scaling = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": factors,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    longer = make_checkpoint(**VARIANTS["llama"], rope_parameters=scaling)
    with pytest.raises(ModelError, match=r"rows up to 64 tokens as those of rows of 160 \(longrope\): use --engine"):
        in_vllm(longer)
    in_vllm(longer, max_model_len=64)


def test_a_kept_schedule_that_has_lost_a_file_is_kept_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    kept = _kept(schedule())
    whole = {path.name: path.read_bytes() for path in kept.iterdir()}
    assert _kept(schedule()) == kept
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(b"")):
        for name in whole:
            damage(kept / name)
            assert _kept(schedule()) == kept
            assert {path.name: path.read_bytes() for path in kept.iterdir()} == whole
    assert [*kept.parent.iterdir()] == [kept]


def test_a_vllm_that_does_not_start_is_the_models_error(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the rows that it was started for."""
    monkeypatch.setattr("engine.vllm.engine.START_AGAIN_S", 0)
    engine = in_vllm(make_checkpoint(**VARIANTS["llama"]), quantization="nonsense")
    with pytest.raises(ModelError, match=r"vLLM does not start with model .*nonsense"):
        engine.decoding(schedule=schedule())


def test_another_gpu_than_the_first_is_refused_with_the_way_out(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.vllm.engine.check_device", lambda _: None)
    with pytest.raises(ModelError, match=r"set CUDA_VISIBLE_DEVICES=1 and use --device cuda"):
        VllmEngine(str(make_checkpoint(**VARIANTS["llama"])), "bfloat16", "cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(ModelError, match=r"set CUDA_VISIBLE_DEVICES=3 and use --device cuda"):
        VllmEngine(str(make_checkpoint(**VARIANTS["llama"])), "bfloat16", "cuda:1")


def test_vllm_reads_the_files_that_our_engine_reads(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """As Mistral publishes its models: beside the shards the same in its own library's format, which vLLM prefers."""
    made = make_checkpoint(**VARIANTS["mistral, sliding window"], max_shard_size="20KB")
    directory = Path(shutil.copytree(made, tmp_path / "mistral"))
    assert not (directory / "model.safetensors").exists()
    (directory / "consolidated.safetensors").write_bytes(b"no weights")
    (directory / "params.json").write_text('{"dim": 32}')
    engine = in_vllm(directory)
    prompts, sampling = random_prompts([5, 30]), Sampling(max_new_tokens=14)
    assert generations(engine, prompts, sampling, schedule()) == generations(
        Engine.load(str(directory), "cpu"), prompts, sampling, schedule()
    )
    engine.close()


def test_a_vllm_that_finds_no_room_is_started_once_more(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had the memory before may not have left it yet."""
    monkeypatch.setattr("engine.vllm.engine.START_AGAIN_S", 0)
    engine, starts = in_vllm(make_checkpoint(**VARIANTS["llama"])), list[int]()
    start = engine._start

    def started(schedule: Schedule, rows: int) -> Any:
        starts.append(rows)
        if len(starts) == 1:
            raise ValueError("Free memory on device is less than desired GPU memory utilization")
        return start(schedule, rows)

    monkeypatch.setattr(engine, "_start", started)
    engine.decoding(batch_size=3).close()
    assert starts == [3, 3]
    engine.close()
