"""vLLM's scheduler, held to what a schedule asks of it.

Three things differ. A generated token that is computed again, after its row was preempted, runs alone and not as part
of a prompt: its keys and values are then those of its step. Blocks with generated tokens are not kept for other
prompts to read: the layers that such tokens skip have nothing in them. And the tokens that a prompt shares with others,
which run all layers, are not of one pass with what follows them.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from engine.vllm.plugin import shared_of


class _Keeper:
    """What both schedulers do differently."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        cache, lookup = manager.coordinator.cache_blocks, manager.get_computed_blocks

        def cache_prompt(request: Any, computed: int) -> None:
            # Not the prompt's last token either: under a prompt bridge it alone has run the upper layers.
            cache(request, min(computed, request.num_prompt_tokens - 1))

        def look_up(request: Any) -> Any:
            # A row that comes back may find its own answer cached as the prompt of another: at full depth.
            return (manager.empty_kv_cache_blocks, 0, 0) if request.num_output_tokens else lookup(request)

        manager.coordinator.cache_blocks, manager.get_computed_blocks = cache_prompt, look_up

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """How many of a row's tokens a pass takes: tokens of its prompt that run alike, or one generated token."""
        ends = (shared_of(request.sampling_params), request.num_prompt_tokens)
        most = next((end - num_computed_tokens for end in ends if end > num_computed_tokens), 1)
        wanted: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)  # type: ignore[misc]
        return min(wanted, most)


class ScheduleKeeper(_Keeper, Scheduler):
    """Of passes that are waited for."""


class AsyncScheduleKeeper(_Keeper, AsyncScheduler):
    """Of passes that are prepared while the one before still runs."""


def keeper(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """The scheduler of a configuration: stands where vLLM looks for a class before it has chosen between the two."""
    kind = AsyncScheduleKeeper if vllm_config.scheduler_config.async_scheduling else ScheduleKeeper
    return kind(vllm_config, *args, **kwargs)
