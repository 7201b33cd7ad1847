"""What the pipeline costs on top of the engine: the same rows through the job and through a bare engine, in one run.

    python -m jobs.benchmarks.pipeline

The bare engine gets tokenised prompts and writes nothing. Model load and start-up are left out of both sides: the job's
clock runs from its first replica being ready to its last commit.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import ray
from pydantic import Field
from rich.console import Console

from engine import Engine
from jobs import command_line
from jobs.benchmarks.texts import encoded, read_columns
from jobs.summarize_corpus import SummarizeCorpus
from pipeline.errors import JobError
from pipeline.preparing.backend import runs_in_vllm
from pipeline.preparing.fit import choose_schedule, longest_prompt
from pipeline.run import run_job
from pipeline.storage.settings import Place

PROGRAM = "jobs.benchmarks.pipeline"


class BenchmarkPipeline(SummarizeCorpus):
    """Tokens/s of the summarising job over those of a bare engine on the same rows."""

    input: Place = Field("infra/demo/package_descriptions.parquet", description="Parquet file of texts")
    output: str = Field("", description="not used: every round writes to a scratch directory")
    batch_size: int = Field(16, ge=1, description="rows that decode together, on both sides")
    rows_per_unit: int = Field(32, ge=1, description="rows per work unit")
    rounds: int = Field(3, ge=1, description="times both sides run, in turn")


def benchmark(config: BenchmarkPipeline) -> None:
    if config.plan:
        raise JobError("a benchmark is no plan: leave out --plan")
    if runs_in_vllm(config) or (config.replicas or 1) > 1 or config.audit_fraction:
        raise JobError("both sides are one engine of our own, unaudited: --engine torch, and no --replicas, no audits")
    console = Console()
    engine = Engine.load(config.model, config.device, config.dtype, config.threads_per_replica)
    schedule = choose_schedule(config, engine.shape, config)
    texts = read_columns([config.input], [config.text_column])[config.text_column].to_pylist()[: config.limit]
    template = config.template()
    prompts = encoded(texts, template, engine.tokenizer, longest_prompt(config, engine.shape))
    engine.share_prefix(template.shared_prefix(engine.tokenizer))
    list(engine.generate(prompts[:2], config.sampling(), schedule))  # warm-up
    ratios = []
    for turn in range(config.rounds):
        start = time.perf_counter()
        generations = list(engine.generate(prompts, config.sampling(), schedule, config.batch_size))
        bare = sum(generation.generated_tokens for generation in generations) / (time.perf_counter() - start)
        with tempfile.TemporaryDirectory() as scratch:
            job_config = config.model_copy(update={"output": str(Path(scratch) / "out")})
            result = run_job(job_config)
        ray.shutdown()
        job = result.totals.generated_tokens / result.generating_seconds
        ratios.append(job / bare)
        console.print(f"round {turn + 1}: output tokens/s {bare:.1f} bare, {job:.1f} in the job, {job / bare:.3f}")
    console.print(f"{len(texts)} rows, median ratio job / bare engine: {median(ratios):.3f}")


if __name__ == "__main__":
    sys.exit(command_line.start(BenchmarkPipeline, PROGRAM, benchmark))
