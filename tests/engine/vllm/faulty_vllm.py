"""vLLM whose passes fail."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.config import GenerationConfig
from pipeline.preparing.backend import Backend

ROOM = 2  # rows


def failing(
    llm: Any, fault: str, is_bad: Callable[[list[int]], bool], tell: Callable[[int], None] = lambda rows: None
) -> Any:
    """The same vLLM. For "memory" a pass of more than ROOM rows fails, for "row" one with a prompt that is bad; told
    is how many rows it had."""
    step = llm.step

    def failing_step() -> Any:
        running = llm.engine_core.engine_core.scheduler.running
        if fault == "memory" and len(running) > ROOM:
            tell(len(running))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        if fault == "row" and any(is_bad(list(each.prompt_token_ids)) for each in running):
            tell(len(running))
            raise ValueError("this row cannot be")
        return step()

    llm.step = failing_step
    return llm


@dataclass(frozen=True)
class Faulty(Backend):
    """For jobs on Ray, whose replicas import it. A row that is UNLUCKY is bad."""

    fault: str = ""

    def engine(self, config: GenerationConfig, threads: int | None) -> Any:
        engine: Any = super().engine(config, threads)
        start = engine._start

        def is_bad(prompt: list[int]) -> bool:
            return "UNLUCKY" in engine.tokenizer.decode(prompt)

        engine._start = lambda *how: failing(start(*how), self.fault, is_bad)
        return engine
