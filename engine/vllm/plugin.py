"""What vLLM loads at its start, in every process: from here on one setting names a schedule.

`additional_config={"skipdecode_schedule": "<directory>"}` of `LLM(...)`, or `--additional-config` of `vllm serve` and
`vllm run-batch`. Without it nothing of vLLM changes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

from engine.errors import ScheduleError
from engine.schedules.schedule import Schedule

log = logging.getLogger(__name__)

SETTING = "skipdecode_schedule"
PREFIX = "Skipdecode"
# vLLM's architectures whose layers are units of ours, and the class that runs them.
MODELS = {
    "LlamaForCausalLM": "SkippingLlama",
    "MistralForCausalLM": "SkippingMistral",
    "Qwen2ForCausalLM": "SkippingQwen2",
    "Qwen3ForCausalLM": "SkippingQwen3",
    "Gemma2ForCausalLM": "SkippingGemma2",
    "Gemma3ForCausalLM": "SkippingGemma3",
    "GraniteForCausalLM": "SkippingGranite",
    "OPTForCausalLM": "SkippingOPT",
}


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


def schedule_of(config: Any) -> Schedule | None:
    """The schedule that a vLLM configuration names; raises ScheduleError.

    A head preview is left out: on the devices that vLLM is for the whole vocabulary head is one fast product.
    """
    setting = config.additional_config
    directory = setting.get(SETTING) if isinstance(setting, dict) else None
    return None if directory is None else replace(Schedule.read(directory), head_preview=None)


def apply(config: Any) -> None:
    """Make a vLLM configuration one that runs its schedule. Raises ScheduleError for what cannot be had together."""
    schedule, model = schedule_of(config), config.model_config
    if schedule is None or model is None:
        return
    if (model.hf_config.architectures or [""])[0].startswith(PREFIX):
        return  # done by the process that this one was started by
    if model.architecture not in MODELS:
        raise ScheduleError(f"schedules run in vLLM on {', '.join(MODELS)}, not on {model.architecture}")
    layers = model.hf_text_config.num_hidden_layers
    if schedule.layers != layers:
        raise ScheduleError(f"the schedule is for a model of {schedule.layers} layers, this one has {layers}")
    for what, used in _unsupported(config, schedule).items():
        if used:
            raise ScheduleError(f"a schedule does not run together with {what}")
    # Which tokens run a layer changes from pass to pass: a recorded graph would have it frozen.
    model.enforce_eager = True
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    config.scheduler_config.scheduler_cls = "engine.vllm.scheduler.keeper"
    model.hf_config.architectures = [PREFIX + model.architecture]
    log.info("decoding under the schedule %s", config.additional_config[SETTING])


def _unsupported(config: Any, schedule: Schedule) -> dict[str, bool]:
    """What has not been proven to give the schedule's tokens, and whether this configuration asks for it."""
    parallel, scheduler = config.parallel_config, config.scheduler_config
    return {
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "microbatches": parallel.use_ubatching,
        "a cache shared with other servers": config.kv_transfer_config is not None,
        "a scheduler class of your own": scheduler.scheduler_cls is not None,
        "an adapter and tensor parallelism": schedule.adapter is not None and parallel.tensor_parallel_size > 1,
        "an adapter and quantised weights": schedule.adapter is not None
        and config.model_config.quantization is not None,
    }
