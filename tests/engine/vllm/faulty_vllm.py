"""vLLM whose passes fail, for jobs on Ray, whose replicas import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipeline.config import GenerationConfig
from pipeline.preparing.backend import Backend

ROOM = 2  # rows


@dataclass(frozen=True)
class Faulty(Backend):
    """vLLM whose passes fail: for want of memory with more than ROOM rows, or for a row that is UNLUCKY."""

    fault: str = ""

    def engine(self, config: GenerationConfig, threads: int | None) -> Any:
        engine: Any = super().engine(config, threads)
        start = engine._start

        def started(*how: Any) -> Any:
            llm = start(*how)
            step = llm.step

            def failing() -> Any:
                running = llm.engine_core.engine_core.scheduler.running
                if self.fault == "memory" and len(running) > ROOM:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
                prompts = [engine.tokenizer.decode(list(each.prompt_token_ids)) for each in running]
                if self.fault == "row" and any("UNLUCKY" in prompt for prompt in prompts):
                    raise ValueError("this row cannot be")
                return step()

            llm.step = failing
            return llm

        engine._start = started
        return engine
