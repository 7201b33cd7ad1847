"""How long the whole job takes: this project's engine, at full depth and under schedules, and its peers, in one run.

    make benchmark-job

Every contender is a process of its own, loaded before any clock runs, and answers the same prompts, greedily, once a
round; only the one whose turn it is computes. Beside its time stands the least that its FLOPs could take here, what a
schedule should save and does save, and what became of the answers. A peer that is not installed is left out.
"""

import json
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from rich.console import Console

from engine import Schedule, Tokenizer, checkpoint_directory, describe, for_target_speedup
from engine.schedules import recipes
from jobs import command_line
from jobs.answers import TargetSpeedup
from jobs.benchmarks.figures import Measured, WholeJob, figures, multiply_rate
from jobs.benchmarks.peers.protocol import Job
from jobs.benchmarks.shown import quality_table, speed_table, write_chart
from jobs.benchmarks.texts import encoded, read_columns
from jobs.benchmarks.worker import RUNNERS, VARIANTS, VLLM_PLUGIN, Worker
from jobs.prompts import PACKAGES
from pipeline.errors import JobError
from pipeline.preparing.fit import read_schedules
from pipeline.rows.template import PromptTemplate
from pipeline.storage.ownership import claim_directory
from pipeline.storage.settings import LocalPlace

PROGRAM = "jobs.benchmarks.job"
DEMO = Path("infra/demo")

NamedSchedules = dict[str, tuple[Path, Schedule]]  # where a schedule lies, and what it is


class BenchmarkJob(BaseModel):
    """Compare whole jobs of real prompts: our engine at full depth and under schedules, and its peers."""

    model_config = ConfigDict(extra="forbid")

    contenders: list[str] = Field(
        [name for name in RUNNERS if name not in VARIANTS],
        min_length=1,
        description=f"who runs, of {', '.join(RUNNERS)}; the first one's full depth is what all are compared with; "
        f"{', '.join(VARIANTS)}: our engine in batches that nobody enters before all rows have ended, and without one "
        "of its optimisations",
    )
    schedules: list[LocalPlace] = Field(
        [DEMO / "adapted", DEMO / "whole_sample_2x"],
        description="directories of schedules, or of several, that the engine and vLLM also run under",
    )
    speedups: list[TargetSpeedup] = Field(
        [], description="decode FLOP speed-ups of schedules without bridges to run too, with the paper's linear ramp"
    )
    model: str = Field("smollm2-135m-instruct", description="as for the jobs")
    input: list[LocalPlace] = Field(
        [DEMO / "package_descriptions.parquet", DEMO / "more_package_descriptions.parquet"],
        description="Parquet files of texts, read in turn",
    )
    text_column: str = Field("text", description="their text column")
    reference_column: str = Field("reference", description="their column of reference answers")
    prompt: str = Field(PACKAGES, description="user text with a {text} field")
    prompt_format: Literal["chat", "raw"] = Field("chat", description="render prompts as a chat's user turn, or bare")
    rows: int = Field(192, ge=1, description="prompts of the job")
    max_new_tokens: int = Field(48, ge=2, description="longest answer")
    full_length: bool = Field(False, description="let no answer end before it is so long")
    batch_size: int = Field(32, ge=1, description="rows that may decode together")
    rounds: int = Field(3, ge=1, description="times every contender runs, in turns; medians are shown")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where models run; OpenVINO knows only cpu")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="what they compute in")
    gpu_memory_share: float = Field(
        0.2, gt=0, lt=1, description="of a GPU's memory, for each contender that is vLLM: all are there at once"
    )
    random_weights: bool = Field(
        False, description="the model is a config and a tokenizer, as jobs.benchmarks.shapes writes them; vLLM alone"
    )
    threads: int = Field(torch.get_num_threads(), ge=1, description="CPU threads of each contender")
    peers_python: str = Field(
        ".venv-peers/bin/python", description="interpreter of transformers, CTranslate2 and OpenVINO; make peers"
    )
    vllm_python: str = Field(".venv-vllm/bin/python", description="interpreter of vLLM; make vllm-env")
    output: LocalPlace = Field(Path("out/benchmark-job"), description="directory for job.json, job.svg and logs")

    @field_validator("contenders")
    @classmethod
    def _are_known(cls, names: list[str]) -> list[str]:
        if unknown := [name for name in names if name not in RUNNERS]:
            raise ValueError(f"{unknown[0]!r} is not known: known are {', '.join(RUNNERS)}")
        return names

    @model_validator(mode="after")
    def _can_do_without_weights(self) -> Self:
        if self.random_weights and self.contenders != ["vllm"]:
            raise ValueError("--random-weights is for vLLM alone: --contenders vllm")
        return self


def benchmark(config: BenchmarkJob) -> None:
    """Raises JobError if the first contender cannot run or one fails on its way; ModelError, ScheduleError."""
    claim_directory(config.output, PROGRAM, config.input)
    console = Console()
    torch.set_num_threads(config.threads)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as workers:
        job, task, tokenizer = _job(config, Path(scratch))
        schedules = named_schedules(config.schedules) | bare_schedules(
            config.speedups, config.max_new_tokens, task, Path(scratch)
        )
        entered = _loaded(config, job, schedules, workers, console)
        rates = []
        for turn in range(config.rounds):
            of_round = []
            first = turn % len(entered)
            for measured, worker in [*entered[first:], *entered[:first]]:
                of_round.append(multiply_rate(torch.device(config.device), getattr(torch, config.dtype)))
                run = worker.run()
                _note(measured, run, tokenizer, config.max_new_tokens)
                console.print(f"{worker.name}: {run['seconds']:.1f} s, {config.rows / run['seconds']:.2f} rows/s")
            rates.append(median(of_round))
            console.print(f"round {turn + 1} of {config.rounds}: matrices multiply at {rates[-1] / 1e9:.0f} GFLOP/s")
    found = figures([measured for measured, _ in entered], task, rates)
    _write(config, task, rates, found, console)


def _job(config: BenchmarkJob, scratch: Path) -> tuple[Job, WholeJob, Tokenizer]:
    """What contenders are given, and what is known of it. Raises JobError if the input has too few rows."""
    directory, shape = checkpoint_directory(config.model), describe(config.model)
    tokenizer, template = Tokenizer(directory), PromptTemplate(config.prompt, format=config.prompt_format)
    columns = [config.text_column, config.reference_column]
    table = read_columns(config.input, columns)
    if len(table) < config.rows:
        raise JobError(f"the input has {len(table)} rows, {config.rows} are asked for: lower --rows")
    texts, references = (table[column].to_pylist()[: config.rows] for column in columns)
    longest = shape.context - config.max_new_tokens
    if longest < 1:
        raise JobError(
            f"max_new_tokens {config.max_new_tokens} leaves a context of {shape.context} no prompt: lower it"
        )
    prompts = encoded(texts, template, tokenizer, longest)
    shared = template.shared_prefix(tokenizer)
    if any(prompt[: len(shared)] != shared for prompt in prompts):
        shared = []
    job = Job(
        str(directory), prompts, shared, config.max_new_tokens, config.max_new_tokens * config.full_length,
        config.batch_size, list(tokenizer.eos_ids), config.threads, config.device, config.dtype,
        config.gpu_memory_share, config.random_weights, None, str(scratch),
    )  # fmt: skip
    lengths = [len(prompt) for prompt in prompts]
    return job, WholeJob(shape, lengths, len(shared), [each or "" for each in references]), tokenizer


def bare_schedules(speedups: Sequence[float], new_tokens: int, task: WholeJob, folder: Path) -> NamedSchedules:
    """Those that reach decode FLOP speed-ups and, where there are some, a linear ramp. Raises ScheduleError."""
    if not speedups:
        return {}
    shape, lengths = task.shape, [(tokens, new_tokens) for tokens in task.prompt_tokens]
    found = {f"bare {x:g}x": for_target_speedup(x, lengths, shape) for x in speedups}
    found["linear ramp"] = recipes.skipdecode(shape.layers, 4, shape.layers, min_active=5, horizon=new_tokens - 1)
    for name, schedule in found.items():
        schedule.write(folder / name)
    return {name: (folder / name, schedule) for name, schedule in found.items()}


def _loaded(
    config: BenchmarkJob, job: Job, schedules: NamedSchedules, workers: ExitStack, console: Console
) -> list[tuple[Measured, Worker]]:
    """The contenders that can run here, warm; `workers` ends them. Raises JobError if the first one can't."""
    entered: list[tuple[Measured, Worker]] = []
    for measured, worker in _contenders(config, job, schedules, console):
        workers.callback(worker.stop)
        try:
            loaded = worker.load()
        except JobError as error:
            if not entered:  # what all others are compared with
                raise
            console.print(f"left out: {error}", soft_wrap=True)
            continue
        measured.version, measured.load_seconds = loaded["version"], loaded["load_seconds"]
        console.print(f"{worker.name}: loaded in {measured.load_seconds:.0f} s, version {measured.version}")
        entered.append((measured, worker))
    return entered


def _contenders(
    config: BenchmarkJob, job: Job, schedules: NamedSchedules, console: Console
) -> Iterator[tuple[Measured, Worker]]:
    """Those that are installed, full depth first; says who isn't. Raises JobError."""
    pythons = {"own": sys.executable, "peers": config.peers_python, "vllm": config.vllm_python}
    for kind in config.contenders:
        runner, python = RUNNERS[kind], str(Path(pythons[RUNNERS[kind].environment]).absolute())
        reason = runner.missing(python)
        if reason is None and kind == "openvino" and config.device != "cpu":
            reason = f"{runner.label} is left out: it runs on CPUs alone here"
        if reason is not None:
            if kind == config.contenders[0]:
                raise JobError(reason)
            console.print(reason, soft_wrap=True)
            continue
        under: NamedSchedules = schedules if runner.takes_schedules else {}
        if kind == "vllm" and under and (reason := VLLM_PLUGIN.missing(python)) is not None:
            console.print(reason, soft_wrap=True)
            under = {}
        for name, (path, schedule) in {"": (None, None), **under}.items():
            # vLLM computes the whole head: see engine.vllm.
            run = schedule.with_whole_head if schedule and kind == "vllm" else schedule
            label = f"{runner.label}, {name}" if name else runner.label
            log = config.output / f"{kind}{'-' * bool(name)}{name.replace('/', '-').replace(' ', '-')}.log"
            its_job = replace(job, schedule=str(path.absolute())) if path else job
            yield Measured(label, kind, run), Worker(label, runner, python, its_job, log)


def named_schedules(paths: Sequence[Path]) -> NamedSchedules:
    """By name, or by path where names are alike. Raises ScheduleError."""
    found = [
        (f"{path.name}/{folder}" if folder else path.name, path / folder, schedule)
        for path in paths
        for folder, schedule in read_schedules(str(path)).items()
    ]
    often = Counter(name for name, _, _ in found)
    return {name if often[name] == 1 else str(path): (path, schedule) for name, path, schedule in found}


def _note(measured: Measured, run: dict[str, Any], tokenizer: Tokenizer, new_tokens: int) -> None:
    """Keep a round's time, and the answers, of which only some contenders give the token that ended them."""
    ends = set(tokenizer.eos_ids)
    answers = [
        answer[: next((at for at, token in enumerate(answer) if token in ends), len(answer))]
        for answer in run.pop("answers")
    ]
    measured.cache_course = run.pop("cache_course")
    measured.rounds.append(run)
    measured.answers, measured.texts = answers, [tokenizer.decode(answer) for answer in answers]
    measured.generated = [min(len(answer) + 1, new_tokens) for answer in answers]


def _write(
    config: BenchmarkJob, task: WholeJob, rates: Sequence[float], found: Sequence[dict[str, Any]], console: Console
) -> None:
    """Tables, job.json and job.svg."""
    mean_prompt = sum(task.prompt_tokens) / len(task.prompt_tokens)
    title = (
        f"{config.rows} rows, prompts of {mean_prompt:.0f} tokens, {task.shared} of them shared, at most "
        f"{config.max_new_tokens} new, {config.dtype}, {config.threads} threads, median of {config.rounds}"
    )
    console.print(speed_table(title, found))
    console.print(quality_table(found))
    processor = platform.processor() or platform.machine()
    machine = {"processor": processor, "torch": torch.__version__, "flops_per_second": list(rates)}
    report = {"config": config.model_dump(mode="json"), "machine": machine, "contenders": list(found)}
    (config.output / "job.json").write_text(json.dumps(report, indent=1) + "\n")
    write_chart(config.output / "job.svg", title, found)
    console.print(f"figures: {config.output / 'job.json'}, chart: {config.output / 'job.svg'}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(command_line.start(BenchmarkJob, PROGRAM, benchmark))
