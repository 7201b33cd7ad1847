"""Requests that a schedule cannot serve are refused as they come in, by vLLM's own kind of error."""

from __future__ import annotations

from typing import Any

from engine.vllm.plugin import FULL_DEPTH, schedule_of


def install() -> None:
    """Have vLLM's input processors look at what requests ask for, where there is a schedule."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    begin, process = InputProcessor.__init__, InputProcessor.process_inputs

    def begun(processor: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        schedule = schedule_of(vllm_config)  # now: its directory may be gone by the time that requests come
        processor.has_schedule = schedule is not None
        processor.has_prompt_bridge = schedule is not None and schedule.prompt_bridge is not None
        begin(processor, vllm_config, *args, **kwargs)

    def processed(processor: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if processor.has_schedule and kwargs.get("resumable"):
            # Answers become parts of prompts, with the layers that they skipped missing from the cache.
            raise VLLMValidationError("a schedule does not run together with streaming input", parameter="resumable")
        asked = getattr(params, "prompt_logprobs", None)
        full_depth = (getattr(params, "extra_args", None) or {}).get(FULL_DEPTH)
        if processor.has_prompt_bridge and asked is not None and not full_depth:
            # Of states that stop below the upper layers.
            raise VLLMValidationError(
                f"under a prompt bridge prompts have no log-probabilities: ask for {FULL_DEPTH} too",
                parameter="prompt_logprobs",
                value=asked,
            )
        return process(processor, request_id, prompt, params, *args, **kwargs)

    InputProcessor.__init__, InputProcessor.process_inputs = begun, processed
