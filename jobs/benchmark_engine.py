"""Engine speed on this machine: transformers `generate` against the engine at full depth and at reduced depth.

    python jobs/benchmark_engine.py

Every round runs every contender once, in a rotating order, on the same prompts; ratios are taken within a round and
their median is printed, so that a machine whose speed drifts does not decide the result.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from engine import (
    BatchStats,
    Engine,
    Sampling,
    Schedule,
    checkpoint_directory,
    decode_flop_speedup,
    for_target_speedup,
)
from jobs import command_line

PROGRAM = "benchmark_engine.py"
TRANSFORMERS, FULL_DEPTH = "transformers", "full depth"


class BenchmarkEngine(BaseModel):
    """Compare the engine with transformers and with itself at reduced depth, on real prompts, float32 and greedy."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field("smollm2-135m-instruct", description="as for the jobs")
    input: Path = Field(Path("infra/demo/package_descriptions.parquet"), description="Parquet file of texts")
    text_column: str = Field("text", description="its text column")
    batch_sizes: list[int] = Field([8, 32], description="rows that decode together")
    speedups: list[float] = Field([1.5, 2.0, 3.0], description="decode FLOP speed-ups to schedule")
    new_tokens: int = Field(32, ge=2, description="tokens generated for every prompt, none ends earlier")
    rounds: int = Field(5, ge=1, description="times every contender runs")
    threads: int = Field(torch.get_num_threads(), ge=1, description="CPU threads")
    output: Path | None = Field(None, description="JSON file to write all figures to")


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of one batch."""

    prefill_seconds: float
    decode_seconds: float
    rows: int
    new_tokens: int

    @property
    def output_rate(self) -> float:
        """Output tokens/s of the whole run, prompts included."""
        return self.rows * self.new_tokens / (self.prefill_seconds + self.decode_seconds)

    @property
    def decode_rate(self) -> float:
        """Output tokens/s while decoding: the first token comes from the prompt pass."""
        return self.rows * (self.new_tokens - 1) / self.decode_seconds


@dataclass
class Contender:
    name: str
    run: Callable[[], Timing]
    flop_speedup: float = 1.0
    timings: list[Timing] = field(default_factory=list)


class FirstToken(StoppingCriteria):
    """Stops nothing; notes when `generate` has its first token."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.at = self.at or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def main() -> int:
    config = command_line.parse(BenchmarkEngine, PROGRAM)
    return command_line.run(PROGRAM, lambda: benchmark(config))


def benchmark(config: BenchmarkEngine) -> None:
    torch.set_num_threads(config.threads)
    engine = Engine.load(config.model, device="cpu", dtype="float32", threads=config.threads)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint_directory(config.model), dtype=torch.float32).eval()
    texts = pq.read_table(config.input, columns=[config.text_column])[config.text_column].to_pylist()
    console = Console()
    results = []
    for batch_size in config.batch_sizes:
        prompts = [
            engine.tokenizer.encode_chat(f"Summarize this software package in one short sentence.\n\n{text}")
            for text in texts[:batch_size]
        ]
        contenders = _contenders(engine, reference, prompts, config)
        for turn in range(config.rounds + 1):
            for contender in contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]:
                timing = contender.run()
                if turn:  # the first round warms up
                    contender.timings.append(timing)
        rows = _compare(contenders)
        mean_prompt = sum(map(len, prompts)) / len(prompts)
        console.print(_table(f"batch {batch_size}, prompts of {mean_prompt:.0f} tokens on average", rows, config))
        results.append({"batch_size": batch_size, "mean_prompt_tokens": mean_prompt, "contenders": rows})
    if config.output:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        report = {"config": config.model_dump(mode="json"), "machine": machine, "results": results}
        config.output.write_text(json.dumps(report, indent=1))
        console.print(f"figures: {config.output}")


def _contenders(
    engine: Engine, reference: PreTrainedModel, prompts: Sequence[list[int]], config: BenchmarkEngine
) -> list[Contender]:
    lengths = [(len(prompt), config.new_tokens) for prompt in prompts]
    found = [
        Contender(TRANSFORMERS, lambda: _time_transformers(reference, prompts, config.new_tokens)),
        Contender(FULL_DEPTH, lambda: _time_engine(engine, prompts, config.new_tokens, None)),
    ]
    for speedup in config.speedups:
        schedule = for_target_speedup(speedup, lengths, engine.shape)

        def run(schedule: Schedule = schedule) -> Timing:
            return _time_engine(engine, prompts, config.new_tokens, schedule)

        found.append(Contender(f"{speedup:g}x", run, decode_flop_speedup(engine.shape, schedule, lengths)))
    return found


def _time_engine(engine: Engine, prompts: Sequence[list[int]], new_tokens: int, schedule: Schedule | None) -> Timing:
    sampling = Sampling(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    batches: list[BatchStats] = []
    list(engine.generate(prompts, sampling, schedule, len(prompts), on_batch=batches.append))
    (batch,) = batches
    return Timing(batch.prefill_seconds, batch.decode_seconds, len(prompts), new_tokens)


def _time_transformers(reference: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int) -> Timing:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    first = FirstToken()
    start = time.perf_counter()
    with torch.inference_mode():
        reference.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([first]),
        )
    end = time.perf_counter()
    assert first.at is not None
    return Timing(first.at - start, end - first.at, len(prompts), new_tokens)


def _compare(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """Medians of each contender, and of its ratios to the baselines round by round."""
    by_name = {contender.name: contender for contender in contenders}

    def ratio(contender: Contender, baseline: str, rate: Callable[[Timing], float]) -> float:
        pairs = zip(contender.timings, by_name[baseline].timings, strict=True)
        return median(rate(ours) / rate(theirs) for ours, theirs in pairs)

    rows = []
    for contender in contenders:
        measured = ratio(contender, FULL_DEPTH, lambda timing: timing.decode_rate)
        rows.append(
            {
                "name": contender.name,
                "output_tokens_per_s": median(timing.output_rate for timing in contender.timings),
                "decode_tokens_per_s": median(timing.decode_rate for timing in contender.timings),
                "output_vs_transformers": ratio(contender, TRANSFORMERS, lambda timing: timing.output_rate),
                "decode_vs_transformers": ratio(contender, TRANSFORMERS, lambda timing: timing.decode_rate),
                "decode_flop_speedup": contender.flop_speedup,
                "measured_speedup": measured,
                "realised_share": measured / contender.flop_speedup,
                "timings": [asdict(timing) for timing in contender.timings],
            }
        )
    return rows


def _table(title: str, rows: Sequence[dict[str, Any]], config: BenchmarkEngine) -> Table:
    table = Table(
        title=f"{title}, {config.new_tokens} new tokens, {config.threads} threads, median of {config.rounds} rounds",
        caption="/ hf: over transformers; FLOP x, measured x: decode speed-ups over full depth; realised: their ratio",
    )
    headings = (
        "contender",
        "output tok/s",
        "decode tok/s",
        "output / hf",
        "decode / hf",
        "FLOP x",
        "measured x",
        "realised",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for row in rows:
        scheduled = row["name"] != TRANSFORMERS
        table.add_row(
            row["name"],
            f"{row['output_tokens_per_s']:.1f}",
            f"{row['decode_tokens_per_s']:.1f}",
            f"{row['output_vs_transformers']:.2f}x",
            f"{row['decode_vs_transformers']:.2f}x",
            f"{row['decode_flop_speedup']:.2f}x" if scheduled else "",
            f"{row['measured_speedup']:.2f}x" if scheduled else "",
            f"{row['realised_share']:.2f}" if scheduled else "",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
