"""What vLLM loads at its start, in every process: from here on one setting names a schedule.

`additional_config={"skipdecode_schedule": "<directory>"}` of `LLM(...)`, or `--additional-config` of `vllm serve` and
`vllm run-batch`. Without it nothing of vLLM changes. A second one, `skipdecode_shared_tokens`, says how many tokens
prompts begin alike with; requests may say it of their own in `extra_args`.
"""

import logging
import os
from typing import Any

import torch

from engine.errors import ScheduleError
from engine.schedules.schedule import Schedule

log = logging.getLogger(__name__)

SETTING = "skipdecode_schedule"
FULL_DEPTH = "skipdecode_full_depth"  # of a request's `extra_args`
# First tokens of a prompt, all but its last, that are as at full depth: what prompts share is never bridged. See
# `Engine.share_prefix`. For all requests, or in one's `extra_args`.
SHARED = "skipdecode_shared_tokens"
PREFIX = "Skipdecode"
VERSION = "0.32"  # of vLLM, whose own functions are changed here
# vLLM's architectures whose layers are units of ours, and the class that runs them.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Granite", "Phi3", "OPT")
MODELS = {f"{family}ForCausalLM": f"Skipping{family}" for family in FAMILIES}
# Those that take rows in any order, and keep nothing of one pass's metadata in what they build for parts of it.
ATTENTION = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
# Load formats that do not call a model's `load_weights`, where an adapter's copies are made.
UNADAPTED_FORMATS = ("dummy", "ipc_cache", "runai_streamer_sharded", "sharded_state", "tensorizer")


def register() -> None:
    """The entry point. vLLM may call it several times in a process."""
    from vllm.config import VllmConfig
    from vllm.model_executor.models import ModelRegistry

    for architecture, name in MODELS.items():
        ModelRegistry.register_model(PREFIX + architecture, f"engine.vllm.models:{name}")
    if hasattr(VllmConfig, "skipdecode"):
        return
    VllmConfig.skipdecode = True
    verify = VllmConfig.try_verify_and_update_config

    def verify_and_apply(config: Any) -> None:
        verify(config)
        apply(config)

    VllmConfig.try_verify_and_update_config = verify_and_apply
    _look_at_requests()


def schedule_of(config: Any) -> Schedule | None:
    """The schedule that a vLLM configuration names; raises ScheduleError.

    A head preview is left out: on the devices that vLLM is for the whole vocabulary head is one fast product.
    """
    setting = config.additional_config
    directory = setting.get(SETTING) if isinstance(setting, dict) else None
    return None if directory is None else Schedule.read(directory).with_whole_head


def apply(config: Any) -> None:
    """Make a vLLM configuration one that runs its schedule. Raises ScheduleError for what cannot be had together."""
    import vllm

    schedule, model = schedule_of(config), config.model_config
    if schedule is None or model is None:
        return
    if not vllm.__version__.startswith(f"{VERSION}."):
        raise ScheduleError(f"schedules run in vLLM {VERSION}, not in {vllm.__version__}: install that one")
    if (model.hf_config.architectures or [""])[0].startswith(PREFIX):
        return  # done by the process that this one was started by
    if model.architecture not in MODELS:
        raise ScheduleError(f"schedules run in vLLM on {', '.join(MODELS)}, not on {model.architecture}")
    layers = model.hf_text_config.num_hidden_layers
    if schedule.layers != layers:
        raise ScheduleError(f"the schedule is for a model of {schedule.layers} layers, this one has {layers}")
    if not _is_count(config.additional_config.get(SHARED, 0)):
        raise ScheduleError(f"{SHARED} is a number of tokens, not {config.additional_config[SHARED]!r}")
    for what, used in _unsupported(config, schedule).items():
        if used:
            raise ScheduleError(f"a schedule does not run together with {what}")
    _record_in_pieces(config.compilation_config)
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")  # which vLLM turns on for batch invariance
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if config.use_v2_model_runner:  # a watermark wants it, or vLLM has read its environment before
        raise ScheduleError(
            "a schedule does not run in vLLM's Model Runner V2: set VLLM_USE_V2_MODEL_RUNNER=0 before vLLM starts, and "
            "no watermark"
        )
    attention = config.attention_config
    for backend in (attention.backend, *attention.backend_per_kind.values()):
        if backend is not None and backend.name not in ATTENTION:
            known = ", ".join(ATTENTION)
            raise ScheduleError(f"a schedule does not run with attention backend {backend.name}, but with {known}")
    if attention.backend is None:
        attention.backend = _attention_backend(config)
    config.scheduler_config.scheduler_cls = "engine.vllm.scheduler.keeper"
    model.hf_config.architectures = [PREFIX + model.architecture]
    log.info("decoding under the schedule %s", config.additional_config[SETTING])


def _record_in_pieces(compilation: Any) -> None:
    """Which tokens run a layer changes from pass to pass: a graph of a whole pass would have it frozen."""
    from vllm.config import CUDAGraphMode

    if compilation.cudagraph_mode != CUDAGraphMode.NONE:
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    # These move parts of a layer's work into the next layer, which other tokens may run.
    compilation.pass_config.enable_sp = compilation.pass_config.fuse_gemm_comms = False


def _unsupported(config: Any, schedule: Schedule) -> dict[str, bool]:
    """What has not been proven to give the schedule's tokens, and whether this configuration asks for it."""
    from vllm import envs
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    from vllm.config import CompilationMode
    from vllm.utils.platform_utils import is_uva_available

    parallel, scheduler, model = config.parallel_config, config.scheduler_config, config.model_config
    offload = config.offload_config
    prefetched = offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size > 0
    uva = is_uva_available() and not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
    adapter, bridge = schedule.adapter is not None, schedule.prompt_bridge is not None
    load_format = config.load_config.load_format
    return {
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "microbatches": parallel.use_ubatching,
        "a cache shared with other servers": config.kv_transfer_config is not None,
        "a cache offloaded to the host": config.cache_config.kv_offloading_size is not None,
        # Both fetch a layer's weights as the whole of it is called; a schedule calls its parts.
        "weights prefetched from the host": prefetched,
        "weights offloaded to the host without UVA": offload.uva.cpu_offload_gb > 0 and not uva,
        "sleep mode": model.enable_sleep_mode,
        "pooling": model.runner_type != "generate",
        "compilation by PyTorch alone": config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE,
        "breakable graphs": is_breakable_cudagraph_enabled(),
        "a scheduler class of your own": scheduler.scheduler_cls is not None,
        # Blocks of a row that is preempted by another of its pass stay in the cache, and are not computed.
        "priorities": scheduler.policy == "priority",
        "vLLM's front end in Rust": envs.VLLM_USE_RUST_FRONTEND,  # requests come past `_look_at_requests`
        "a prompt bridge and tensor parallelism": bridge and parallel.tensor_parallel_size > 1,
        "an adapter and tensor parallelism": adapter and parallel.tensor_parallel_size > 1,
        "an adapter and quantised weights": adapter and model.quantization is not None,
        f"an adapter and load format {load_format}": adapter and load_format in UNADAPTED_FORMATS,
    }


def _attention_backend(config: Any) -> Any:
    """On GPUs one that takes rows in any order, which vLLM's own choice may not; None leaves the choice to it."""
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import is_quantized_kv_cache
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if not current_platform.is_cuda_alike():
        return None
    quantised = getattr(config.model_config.hf_config, "quantization_config", None)  # may name a cache, vLLM asks later
    is_flash = (
        current_platform.is_cuda()
        and current_platform.has_device_capability(80)
        and config.model_config.dtype in (torch.float16, torch.bfloat16)
        and not is_quantized_kv_cache(config.cache_config.cache_dtype)
        and not (isinstance(quantised, dict) and quantised.get("kv_cache_scheme"))
    )
    return AttentionBackendEnum.FLASH_ATTN if is_flash else AttentionBackendEnum.TRITON_ATTN


def shared_of(params: Any) -> int:
    """Of a request's prompt, by its sampling parameters, once it is admitted."""
    shared: int = (params.extra_args or {}).get(SHARED, 0)
    return shared


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _look_at_requests() -> None:
    """Have vLLM's input processors refuse, by vLLM's own kind of error, what a schedule cannot serve, and note in each
    request what of its prompt is as at full depth.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    begin, process = InputProcessor.__init__, InputProcessor.process_inputs

    def begun(processor: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        schedule = schedule_of(vllm_config)  # now: its directory may be gone by the time that requests come
        processor.has_schedule = schedule is not None
        processor.has_prompt_bridge = schedule is not None and schedule.prompt_bridge is not None
        processor.changes_prompts = schedule is not None and not schedule.prompt_plan.is_full_depth
        processor.shared_tokens = vllm_config.additional_config.get(SHARED, 0) if schedule is not None else 0
        processor.is_on_cpu = vllm_config.device_config.device_type == "cpu"
        begin(processor, vllm_config, *args, **kwargs)

    def processed(processor: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if processor.has_schedule and kwargs.get("resumable"):
            # Answers become parts of prompts, with the layers that they skipped missing from the cache.
            raise VLLMValidationError("a schedule does not run together with streaming input", parameter="resumable")
        if processor.has_schedule and processor.is_on_cpu and getattr(params, "seed", None) is not None:
            # A prompt in parts, or a row computed again, draws a token that vLLM takes back, which it can't there.
            raise VLLMValidationError("under a schedule requests have no seed on CPUs", parameter="seed")
        asked = getattr(params, "prompt_logprobs", None)
        extra = getattr(params, "extra_args", None) or {}
        full_depth, shared = extra.get(FULL_DEPTH), extra.get(SHARED, processor.shared_tokens)
        if full_depth not in (None, False, True):
            raise VLLMValidationError(f"{FULL_DEPTH} is true or false", parameter=FULL_DEPTH, value=full_depth)
        if not _is_count(shared):
            raise VLLMValidationError(f"{SHARED} is a number of tokens", parameter=SHARED, value=shared)
        if processor.has_prompt_bridge and asked is not None and not full_depth:
            # Of states that stop below the upper layers.
            raise VLLMValidationError(
                f"under a prompt bridge prompts have no log-probabilities: ask for {FULL_DEPTH} too",
                parameter="prompt_logprobs",
                value=asked,
            )
        request = process(processor, request_id, prompt, params, *args, **kwargs)
        if not processor.has_schedule:
            return request
        tokens = request.prompt_token_ids if request.prompt_embeds is None else request.prompt_embeds
        shared = min(shared, len(tokens) - 1) if processor.changes_prompts and not full_depth else 0
        if shared or (full_depth and processor.changes_prompts):  # what is cached of a prompt depends on it
            request.cache_salt = f"{request.cache_salt or ''} {FULL_DEPTH if full_depth else f'{SHARED} {shared}'}"
        request.sampling_params.extra_args = {**extra, SHARED: shared}  # vLLM's own copy
        return request

    InputProcessor.__init__, InputProcessor.process_inputs = begun, processed
