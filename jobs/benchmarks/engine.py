"""Engine speed on this machine: the engine at full and reduced depth against transformers and CTranslate2.

    python -m jobs.benchmarks.engine

Every round runs every contender once, in a rotating order, on the same prompts; ratios are taken within a round and
their median is printed, so that a machine whose speed drifts does not decide the result.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import Engine, Schedule, checkpoint_directory, decode_flop_speedup, for_target_speedup
from engine.schedules import recipes
from jobs import command_line
from jobs.benchmarks.floor import MachineRates, decode_floor, measure_rates
from jobs.benchmarks.one_batch.ablation import ALL, Ablation
from jobs.benchmarks.one_batch.contenders import CTranslate2, run_engine, time_engine, time_transformers
from jobs.benchmarks.one_batch.figures import ablation_table, cache_line, table, write_chart
from jobs.benchmarks.one_batch.timing import TimedContender, compare, take_turns
from jobs.prompts import PACKAGES
from pipeline.errors import JobError
from pipeline.rows.template import PromptTemplate
from pipeline.storage.ownership import claim_directory

PROGRAM = "jobs.benchmarks.engine"
FULL_DEPTH = "full depth"
RAMP = "linear ramp"  # the paper's decay: layers, and their cache, go one after the other


class BenchmarkEngine(BaseModel):
    """Compare the engine with its peers and with itself at reduced depth, on real prompts, float32 on CPU, greedy."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field("smollm2-135m-instruct", description="as for the jobs")
    input: Path = Field(Path("infra/demo/package_descriptions.parquet"), description="Parquet file of texts")
    text_column: str = Field("text", description="its text column")
    baselines: list[Literal["transformers", "ctranslate2"]] = Field(
        ["transformers", "ctranslate2"], description="peers to compare with; pip install 'skipdecode[benchmark]'"
    )
    batch_sizes: list[int] = Field([8, 32], description="rows that decode together")
    speedups: list[float] = Field([1.5, 2.0, 3.0], description="decode FLOP speed-ups to schedule")
    new_tokens: int = Field(32, ge=2, description="tokens generated for every prompt, none ends earlier")
    ablation: bool = Field(False, description="also run the engine without each of its optimisations")
    rounds: int = Field(5, ge=1, description="times every contender runs")
    threads: int = Field(torch.get_num_threads(), ge=1, description="CPU threads")
    output: Path = Field(Path("out/benchmark"), description="directory for engine.json and engine.svg")


def main() -> int:
    config = command_line.parse(BenchmarkEngine, PROGRAM)
    return command_line.run(PROGRAM, lambda: benchmark(config))


def benchmark(config: BenchmarkEngine) -> None:
    """Raises JobError if a baseline is not installed, ModelError."""
    if "ctranslate2" in config.baselines and importlib.util.find_spec("ctranslate2") is None:
        raise JobError("ctranslate2 is not installed: pip install ctranslate2, or --baselines transformers")
    claim_directory(config.output, PROGRAM)
    console = Console()
    torch.set_num_threads(config.threads)
    rates = measure_rates()
    console.print(
        f"this machine, {config.threads} threads: reads {rates.bytes_per_second / 1e9:.1f} GB/s, "
        f"multiplies float32 matrices at {rates.flops_per_second / 1e9:.0f} GFLOP/s"
    )
    engine = Engine.load(config.model, device="cpu", dtype="float32", threads=config.threads)
    template, longest = PromptTemplate(PACKAGES), engine.shape.context - config.new_tokens
    texts = pq.read_table(config.input, columns=[config.text_column])[config.text_column].to_pylist()
    with tempfile.TemporaryDirectory() as scratch:
        baselines = _Baselines(config, Path(scratch))
        ablation = Ablation(config.model, config.threads) if config.ablation else None
        results = []
        for batch_size in config.batch_sizes:
            prompts = [template.encode({"text": text}, engine.tokenizer, longest).tokens for text in texts[:batch_size]]
            results.append(_measure(engine, prompts, baselines, rates, config))
            mean_prompt = results[-1]["mean_prompt_tokens"]
            title = f"batch {len(prompts)}, prompts of {mean_prompt:.0f} tokens on average, {config.new_tokens} new"
            console.print(table(f"{title}, median of {config.rounds} rounds", results[-1]["contenders"]))
            for name, course in results[-1]["cache_bytes"].items():
                console.print(cache_line(name, course))
            if ablation is not None:
                without = _ablate(engine, ablation, prompts, template.shared_prefix(engine.tokenizer), config)
                results[-1]["without"] = without
                console.print(ablation_table(f"batch {len(prompts)}: what each optimisation brings", without))
    machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__, **asdict(rates)}
    report = {"config": config.model_dump(mode="json"), "machine": machine, "results": results}
    (config.output / "engine.json").write_text(json.dumps(report, indent=1))
    write_chart(config.output / "engine.svg", results)
    console.print(f"figures: {config.output / 'engine.json'}, chart: {config.output / 'engine.svg'}")


class _Baselines:
    """The peers asked for, loaded once."""

    def __init__(self, config: BenchmarkEngine, scratch: Path) -> None:
        directory = checkpoint_directory(config.model)
        self._names, self._new_tokens = config.baselines, config.new_tokens
        if "transformers" in config.baselines:
            self._transformers = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        if "ctranslate2" in config.baselines:
            self._ctranslate2 = CTranslate2(directory, config.threads, scratch)
            tokenizer = AutoTokenizer.from_pretrained(directory)
            self._vocabulary = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))

    def contenders(self, prompts: Sequence[Sequence[int]]) -> list[TimedContender]:
        runs = {
            "transformers": lambda: time_transformers(self._transformers, prompts, self._new_tokens),
            "ctranslate2": lambda: self._ctranslate2.time(prompts, self._new_tokens, self._vocabulary),
        }
        return [TimedContender(name, runs[name]) for name in self._names]


def _measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    baselines: _Baselines,
    rates: MachineRates,
    config: BenchmarkEngine,
) -> dict[str, Any]:
    """All figures of one batch."""
    lengths = [(len(prompt), config.new_tokens) for prompt in prompts]
    schedules = {FULL_DEPTH: Schedule.full_depth(engine.shape.layers)}
    schedules |= {f"{x:g}x": for_target_speedup(x, lengths, engine.shape) for x in config.speedups}
    layers = engine.shape.layers
    schedules[RAMP] = recipes.skipdecode(layers, 4, max_active=layers, min_active=5, horizon=config.new_tokens - 1)

    ours = [
        TimedContender(
            name,
            partial(time_engine, engine, prompts, config.new_tokens, schedule),
            decode_flop_speedup(engine.shape, schedule, lengths),
            decode_floor(rates, engine.shape, schedule, lengths),
        )
        for name, schedule in schedules.items()
    ]
    contenders = baselines.contenders(prompts) + ours
    take_turns(contenders, config.rounds, partial(track, description="timing", transient=True))
    results: dict[str, Any] = {
        "batch_size": len(prompts),
        "mean_prompt_tokens": sum(map(len, prompts)) / len(prompts),
        "contenders": compare(contenders, FULL_DEPTH),
        "cache_bytes": {  # by schedule, over the decode passes
            name: run_engine(engine, prompts, config.new_tokens, schedule).cache_course
            for name, schedule in schedules.items()
        },
    }
    return results


def _ablate(
    engine: Engine,
    ablation: Ablation,
    prompts: Sequence[Sequence[int]],
    instruction: Sequence[int],
    config: BenchmarkEngine,
) -> dict[str, dict[str, Any]]:
    """By schedule: the engine's ratios over itself without each optimisation."""
    lengths = [(len(prompt), config.new_tokens) for prompt in prompts]
    deepest = for_target_speedup(max(config.speedups), lengths, engine.shape)
    found = {}
    for name, schedule in (
        (FULL_DEPTH, Schedule.full_depth(engine.shape.layers)),
        (f"{max(config.speedups):g}x", deepest),
    ):
        contenders = ablation.contenders(engine, prompts, config.new_tokens, schedule, instruction)
        take_turns(contenders, config.rounds, partial(track, description=f"ablations, {name}", transient=True))
        found[name] = compare(contenders, ALL)[0]
    return found


if __name__ == "__main__":
    sys.exit(main())
