"""A simulation, not a measurement: what a schedule should gain inside vLLM on an H100, which no test here has.

    .venv-vllm/bin/python -m jobs.benchmarks.simulated_gpu

vLLM's own scheduler, held to our rules, decides what each pass takes; a clock of ours says how long the pass lasts.
Each unit takes as long as its slice of the tokens needs of arithmetic or of memory, whichever is more, at published
shares of the card's rates. Without recorded graphs a pass lasts no less than the host takes to start its kernels.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from engine import ModelShape, Schedule
from engine.calibration.prompts import counted_prompt_bridge, prompt_cut
from engine.models.families import family_of
from engine.parts.unit import Unit, all_units
from engine.schedules.schedule import Plateau
from jobs import command_line
from pipeline.errors import JobError

PROGRAM = "jobs.benchmarks.simulated_gpu"
# An H100 SXM's dense bfloat16 FLOP/s and bytes/s, and the shares of them that matrix products of served models reach.
FLOPS, BYTES, FLOPS_SHARE, BYTES_SHARE = 989e12, 3.35e12, 0.65, 0.8
MEMORY_BYTES, CACHE_SHARE = 80e9, 0.9
ELEMENT_BYTES = 2
# Llama-3.1-8B decodes in 8.4 ms a step on an H100 where the host starts each kernel, 5.1 ms from a recorded graph.
HOST_SECONDS_PER_LAYER = 8.4e-3 / 32
PASS_SECONDS = 1.5e-3  # scheduling, sampling, what no graph holds: vLLM reaches 55 % of the floor at 256 rows
BLOCK, PASS_TOKENS, MOST_TOKENS = 16, 8192, 8192
WARM_UP = 4  # layers
MODELS: dict[str, PretrainedConfig] = {
    "Qwen2.5-1.5B": Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=32768,
    ),
}  # fmt: skip


class SimulateGpu(BaseModel):
    """What a schedule should gain inside vLLM on an H100: a simulation on vLLM's scheduler."""

    model_config = ConfigDict(extra="forbid")

    batch_sizes: list[int] = Field([64, 128, 256, 512], description="rows that decode together")
    prompt_tokens: list[int] = Field([128, 1024, 4096], description="lengths of prompts")
    new_tokens: int = Field(
        128, ge=2, description="mean length of answers, drawn evenly from half of it to one and a half"
    )
    decode_skipped: float = Field(1 / 3, gt=0, lt=1, description="share of the layers that decoding skips")
    prompt_skipped: float = Field(1 / 2, gt=0, lt=1, description="share of the layers that prompts are spared")
    output: Path | None = Field(None, description="new file for all figures, as JSON; default none")


@dataclass
class Taken:
    """What a pass takes of its rows."""

    prompts: list[tuple[int, int, bool]] = field(default_factory=list)  # computed before, now, whether the prompt ends
    decoding: dict[int, tuple[int, int]] = field(default_factory=dict)  # by step: rows, the sum of their contexts


class Clock:
    """How long passes last under a schedule."""

    def __init__(self, shape: ModelShape, schedule: Schedule, graphs: bool) -> None:
        self._shape, self._schedule, self._graphs = shape, schedule, graphs
        self._units, bridge = all_units(shape.layers), schedule.prompt_bridge
        self._active = [frozenset(schedule.active_units(plateau)) for plateau in range(len(schedule.plateaus))]
        self._spared = {unit for unit in self._units if bridge and unit.layer >= bridge.first}
        self._spared |= set(bridge.skipped_units if bridge else ())

    def seconds(self, now: Taken) -> float:
        """Of one pass."""
        gpu, started, schedule = 0.0, 0, self._schedule
        running = [(0, 0)] * len(schedule.plateaus)
        for step, (rows, contexts) in now.decoding.items():
            plateau = schedule.plateau_at(step)
            running[plateau] = running[plateau][0] + rows, running[plateau][1] + contexts
        for unit in self._units:
            here = [running[plateau] for plateau, active in enumerate(self._active) if unit in active]
            tokens, read = sum(rows for rows, _ in here), sum(contexts for _, contexts in here)
            pairs = float(read)
            for before, count, ends in now.prompts:
                taken = min(count, (before == 0) + ends) if unit in self._spared else count
                tokens += taken
                read += before + count if taken else 0
                pairs += taken * (before + count / 2)
            if tokens:
                gpu += self._unit(unit, tokens, read, pairs)
                started += 1
        if (bridge := schedule.prompt_bridge) is not None and now.prompts:
            parameters = bridge.stop_parameters + bridge.skip_parameters
            gpu += self._time(2 * parameters * sum(count for _, count, _ in now.prompts), parameters)
        ending = sum(rows for rows, _ in now.decoding.values()) + sum(ends for *_, ends in now.prompts)
        gpu += self._time(2 * self._shape.head_parameters * ending, self._shape.head_parameters)
        host = 0.0 if self._graphs else HOST_SECONDS_PER_LAYER * started / 2
        return max(gpu, host) + PASS_SECONDS

    def _unit(self, unit: Unit, tokens: int, read: float, pairs: float) -> float:
        """For so many tokens, keys and values that are read, and pairs of query and key."""
        shape = self._shape
        if unit.kind == "m":
            return self._time(2 * shape.mlp_parameters * tokens, shape.mlp_parameters)
        flops = 2 * shape.attention_parameters * tokens + 4 * pairs * shape.query_width
        return self._time(flops, shape.attention_parameters + 2 * read * shape.kv_heads * shape.head_dim)

    @staticmethod
    def _time(flops: float, elements: float) -> float:
        return max(flops / (FLOPS * FLOPS_SHARE), elements * ELEMENT_BYTES / (BYTES * BYTES_SHARE))


def main() -> int:
    logging.basicConfig(level=logging.ERROR)
    config = command_line.parse(SimulateGpu, PROGRAM)
    return command_line.run(PROGRAM, lambda: simulate(config))


def simulate(config: SimulateGpu) -> None:
    """Print a table, and write the figures. Raises JobError if a file would be written over."""
    if config.output is not None and config.output.exists():
        raise JobError(f"{str(config.output)!r} is there already: name a new file")
    table = Table(title="SIMULATED H100, bfloat16: whole jobs, times full depth's rows/s")
    names = ["decode", "decode, graphs", "both", "both, graphs"]
    for column in ("model", "rows", "prompt", "prompts' share", *names):
        table.add_column(column, justify="left" if column == "model" else "right")
    figures = []
    for model, described in MODELS.items():
        shape, settings = family_of(described).shape(described), _settings(described)
        skipped = all_units(shape.layers)[2 * WARM_UP : 2 * (WARM_UP + round(config.decode_skipped * shape.layers))]
        decode = Schedule(shape.layers, tuple(skipped), (Plateau(0, len(skipped)),))
        spared = shape.layers - round(config.prompt_skipped * shape.layers)
        cut = prompt_cut(shape, spared, [decode])
        both = replace(decode, prompt_bridge=counted_prompt_bridge(shape, cut))
        for rows in config.batch_sizes:
            for prompt in config.prompt_tokens:
                passes = list(_passes(config, settings, shape, rows, prompt))
                clock = Clock(shape, Schedule.full_depth(shape.layers), graphs=True)
                lasted = [clock.seconds(each) for each in passes]
                share = sum(long for long, each in zip(lasted, passes, strict=True) if each.prompts) / sum(lasted)
                gains = {}
                for name, schedule, graphs in zip(names, [decode] * 2 + [both] * 2, [False, True] * 2, strict=True):
                    clock = Clock(shape, schedule, graphs)
                    gains[name] = sum(lasted) / sum(map(clock.seconds, passes))
                figures.append({"model": model, "rows": rows, "prompt": prompt, "prompts_share": share, **gains})
                shown = (f"{gains[name]:.2f}" for name in names)
                table.add_row(model, str(rows), str(prompt), f"{share:.2f}", *shown)
    Console().print(table)
    if config.output is not None:
        with config.output.open("x") as file:
            json.dump(figures, file, indent=1)


def _passes(config: SimulateGpu, settings: Any, shape: ModelShape, rows: int, prompt: int) -> Iterator[Taken]:
    """Those of a job of four batches. All its rows are there from its start, so no clock changes them."""
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    scheduler, draw = _scheduler(settings, shape, rows), random.Random(0)
    computed: dict[str, int] = {}
    for number in range(4 * rows):
        length = draw.randint(config.new_tokens // 2, 3 * config.new_tokens // 2)
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        params.update_from_generation_config({}, None)
        scheduler.add_request(Request(str(number), [1] * prompt, params, None))
        computed[str(number)] = 0
    while scheduler.has_requests():
        taken = scheduler.schedule()
        now, tokens = Taken(), []
        for request, count in taken.num_scheduled_tokens.items():
            before = computed[request]
            if before < prompt:
                now.prompts.append((before, count, before + count == prompt))
            else:
                rows_there, contexts = now.decoding.get(before - prompt, (0, 0))
                now.decoding[before - prompt] = rows_there + 1, contexts + before + 1
            computed[request] += count
            tokens.append([1] if before + count >= prompt else [])
        yield now
        order = list(taken.num_scheduled_tokens)
        places = {request: place for place, request in enumerate(order)}
        scheduler.update_from_output(taken, ModelRunnerOutput(order, places, tokens))


def _settings(config: PretrainedConfig) -> Any:
    """vLLM's, for a model."""
    from vllm import EngineArgs

    with tempfile.TemporaryDirectory() as directory:
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(directory)
        return EngineArgs(
            model=directory, skip_tokenizer_init=True, dtype="bfloat16", block_size=BLOCK, max_model_len=MOST_TOKENS,
            max_num_batched_tokens=PASS_TOKENS, async_scheduling=False, enable_prefix_caching=False, enforce_eager=True,
        ).create_engine_config()  # fmt: skip


def _scheduler(settings: Any, shape: ModelShape, rows: int) -> Any:
    """vLLM's, with the blocks that an H100 has room for."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from engine.vllm.scheduler import ScheduleKeeper

    weights = ELEMENT_BYTES * (shape.layers * shape.layer_parameters + 2 * shape.head_parameters)
    per_block = ELEMENT_BYTES * shape.layers * shape.cache_elements(BLOCK)
    blocks = int((CACHE_SHARE * MEMORY_BYTES - weights) / per_block)
    settings.cache_config.num_gpu_blocks = blocks
    settings.scheduler_config.max_num_seqs = rows
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=shape.kv_heads, head_size=shape.head_dim, dtype=torch.bfloat16
    )
    cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["attention"], attention)]
    )
    return ScheduleKeeper(settings, cache, StructuredOutputManager(settings), BLOCK)


if __name__ == "__main__":
    sys.exit(main())
