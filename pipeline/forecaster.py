"""Forecast a run from Parquet footers and a random sample of its rows, before any replica is started."""

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from engine import BatchStats, Generation, Ledger, Tokenizer, resolve_device
from engine.forward.prompt_pass import shared_tokens
from pipeline.commits.commit import Commit, open_rows, read_commits, total
from pipeline.config import JobConfig
from pipeline.errors import JobError, NothingToDo, counted, one_line
from pipeline.inputs.sample_prompts import drawn_rows
from pipeline.preparing.backend import Backend, as_it_runs, runs_in_vllm
from pipeline.preparing.incremental import only_new, work_name
from pipeline.preparing.preparation import Preparation, prepare_run
from pipeline.preparing.run_record import claim_name, read_run
from pipeline.reporting.forecast import Forecast
from pipeline.rows.row_generator import RowGenerator, TooManyRowsFailed
from pipeline.rows.rows import ERROR, TOKENS
from pipeline.storage.storage import Storage

LENGTHS = 64  # output lengths that stand for all of an earlier run's
MOST_FILES = 20  # data files of an earlier run that are looked into
SAME_ANSWERS = ("model", "sampling", "prompt")  # of two run records: where these agree, lengths do

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpectedOutputs:
    """What is known of the answers before the run."""

    lengths: Sequence[int]  # output tokens of a row, values that stand for the distribution
    source: str  # in words
    # Seconds per FLOP of prompts and of decoding, and in words where they come from.
    speed: tuple[float, float, str] | None = None


def forecast_run(config: JobConfig, backend: Backend | None = None) -> Forecast:
    """Rows, tokens, FLOPs, time and cost to expect; of an incremental run those of what is new.

    Output lengths come from `plan_output_tokens`, else from answers to sampled prompts, else from what a run with the
    same model, prompt and sampling has committed to the output (which `fresh` discards), else every row is taken to
    reach `max_new_tokens`. A model is loaded for these answers alone. Seconds at full depth assume that its FLOPs take
    as long each as those of the schedule.

    Raises JobError, ModelError, ScheduleError as a run does; NothingToDo if there are no rows, or none that are new to
    an incremental run.
    """
    job = prepare_run(config, backend)
    if config.incremental:
        job = only_new(job)
    else:
        job.plan.warn_of_unreadable()
    config, plan, shape = job.config, job.plan, job.shape
    if not plan.rows:
        raise NothingToDo(f"no rows are found in {config.input!r}")
    ledger = Ledger(shape, as_it_runs(config, job.schedule))
    tokenizer = job.backend.tokenizer(config)
    runs = _sample(job, tokenizer)
    prompts = [tokens for run in runs for tokens in run]
    prefix = job.template.shared_prefix(tokenizer)
    good = [tokens for tokens in prompts if tokens is not None]
    outputs = _outputs(job, ledger, good, prefix)

    scale, samples = plan.input_rows / len(prompts), config.sampling().samples_per_prompt
    # Our own engine computes a prompt once for as many of its samples as decode together, vLLM once.
    together = samples if config.batch_size == "auto" or runs_in_vllm(config) else config.batch_size
    passes = math.ceil(samples / together)
    lengths = [len(tokens) for tokens in good]
    pairs = [(prompt, min(output, shape.context - prompt)) for prompt in lengths for output in outputs.lengths]
    per_output = scale * samples / len(outputs.lengths)
    shared = [shared_tokens(prefix, tokens) for tokens in good]
    flops_prompt = round(scale * passes * sum(map(ledger.prompt, lengths, shared)))
    flops_decode = round(per_output * sum(ledger.decode(*pair) for pair in pairs))
    full_prompt = round(scale * passes * sum(map(ledger.full_depth.prompt, lengths, shared)))
    full_decode = round(per_output * sum(ledger.full_depth.decode(*pair) for pair in pairs))
    seconds, cost = _time_and_cost(outputs, config, flops_prompt, flops_decode)
    full_seconds, full_cost = _time_and_cost(outputs, config, full_prompt, full_decode)
    return Forecast(
        run=work_name(job, plan.units),
        rows=plan.rows,
        work_units=len(plan.units),
        sampled_rows=len(prompts),
        error_share=1 - len(good) / len(prompts),
        prompt_tokens=round(scale * samples * sum(lengths)),
        prompt_tokens_margin=_margin([[len(tokens or ()) for tokens in run] for run in runs], plan.input_rows),
        output_tokens=round(per_output * sum(output for _, output in pairs)),
        output_source=outputs.source,
        flops_prompt=flops_prompt,
        flops_decode=flops_decode,
        flops_decode_full_depth=full_decode,
        flops_full_depth=full_prompt + full_decode,
        seconds=seconds,
        seconds_full_depth=full_seconds,
        speed_source=outputs.speed[2] if outputs.speed else "unknown",
        cost=cost,
        cost_full_depth=full_cost,
        audit_fraction=0.0 if job.schedule.is_full_depth else config.audit_fraction,
        rows_per_prompt=samples / passes,
    )


def _time_and_cost(
    outputs: ExpectedOutputs, config: JobConfig, flops_prompt: int, flops_decode: int
) -> tuple[float | None, float | None]:
    """Seconds of one replica and what they cost, None where that is not known."""
    if outputs.speed is None:
        return None, None
    per_prompt_flop, per_decode_flop, _ = outputs.speed
    seconds = flops_prompt * per_prompt_flop + flops_decode * per_decode_flop
    if config.price_per_gpu_hour is None:
        return seconds, None
    # Of a replica's GPUs; where it has none, of the replica itself.
    return seconds, seconds * config.price_per_gpu_hour * (config.gpus_per_replica or 1.0) / 3600


def _sample(job: Preparation, tokenizer: Tokenizer) -> list[list[list[int] | None]]:
    """Prompts of runs of neighbouring rows, drawn at random; None for a row that no prompt can be made of.

    Rows that cannot be read are left out, as the job leaves out their units. Raises JobError if there are no others, or
    no prompt can be made of any of them.
    """
    config, storage = job.config, job.config.input_storage()
    runs: list[list[list[int] | None]] = []
    left = config.plan_rows
    why: str | None = None
    errors: list[str] = []
    drawn = drawn_rows(left, config, job.plan, storage, job.template, tokenizer, job.longest_prompt)
    for run, prepared in drawn:
        if isinstance(prepared, JobError):
            log.warning("left out rows of %s: %s", run.path, prepared)
            why = why or f"of {run.path!r}: {prepared}"
            continue
        runs.append(prepared[TOKENS].to_pylist()[:left])
        errors += prepared[ERROR].drop_null().to_pylist()[:left]
        left -= len(runs[-1])
        if not left:
            break
    if why is not None and not runs:
        raise JobError(f"no rows can be read; {why}")
    if not any(tokens is not None for run in runs for tokens in run):
        raise JobError(
            f"no prompt can be made of any of {sum(map(len, runs))} sampled rows of {config.input!r}; the first one's "
            f"error: {errors[0]}"
        )
    return runs


def _outputs(job: Preparation, ledger: Ledger, prompts: Sequence[list[int]], prefix: list[int]) -> ExpectedOutputs:
    config = job.config
    if config.plan_prompts:
        # Spread over the sample: neighbours are often alike.
        count = min(config.plan_prompts, len(prompts))
        if runs_in_vllm(config) and config.batch_size != "auto":  # which finds prompts that come again in its cache
            count = min(len(prompts), max(count, config.batch_size // config.sampling().samples_per_prompt))
        found = _answer(job, ledger, [prompts[index * len(prompts) // count] for index in range(count)], prefix)
    else:
        found = _earlier(job) or ExpectedOutputs(
            [config.max_new_tokens], "the most that is allowed, max_new_tokens for every row"
        )
    if config.plan_output_tokens is not None:
        said = f"{config.plan_output_tokens} for every row, as you say"
        return ExpectedOutputs([config.plan_output_tokens], said, found.speed)
    return found


def _answer(job: Preparation, ledger: Ledger, prompts: Sequence[list[int]], prefix: list[int]) -> ExpectedOutputs:
    """Answer some prompts with the run's own settings, in this process: several times over where that takes a batch to
    be full, since fewer rows cost more each.
    """
    config = job.config
    engine = job.backend.engine(config, config.threads_per_replica)
    engine.share_prefix(prefix)
    generator = RowGenerator(engine, config.sampling(), ledger.schedule, config.batch_size)
    count = len(prompts) * generator.samples  # of answers
    times = 1 if config.batch_size == "auto" else max(1, config.batch_size // count)
    stats: list[BatchStats] = []
    try:
        generator.generate(prompts[:1], ["plan:first"])  # what a process does once is done before time counts
        start = time.perf_counter()
        ids = [f"plan:{index}" for index in range(times * len(prompts))]
        answers = generator.generate([*prompts] * times, ids, stats.append)
    except TooManyRowsFailed as error:
        raise JobError(f"the sampled prompts could not be answered: {one_line(error)}") from error
    wall = time.perf_counter() - start
    good = [answer for answer in answers if isinstance(answer, Generation)]
    if not good:
        raise JobError(f"none of {len(prompts)} sampled prompts could be answered: {answers[0]}")
    prefill, decode = sum(s.prefill_seconds for s in stats), sum(s.decode_seconds for s in stats)
    if not prefill + decode:
        prefill = decode = wall / 2
    answered = f"{counted(len(prompts), 'sampled prompt')} answered" + (f" {times} times over" if times > 1 else "")
    source = f"{answered} in {wall:.1f} s"
    if resolve_device(config.device).type == "cpu":  # a replica beside others may have fewer
        source += f" by {torch.get_num_threads()} threads"
    if config.batch_size == "auto":
        source += "; the run's larger batches may be faster"
    speed = (
        prefill / max(1, sum(answer.flops_prompt for answer in good)),
        decode / max(1, sum(answer.flops_decode for answer in good)),
        source,
    )
    of_prompts: list[list[int]] = [[] for _ in prompts]
    for place, answer in enumerate(answers):
        if isinstance(answer, Generation):
            of_prompts[place // generator.samples % len(prompts)].append(answer.generated_tokens)
    # What is drawn differs from run to run, even of the same rows: these are a few of answers without end.
    rows = job.plan.input_rows if config.sampling().is_greedy else None
    margin = _margin([[fmean(lengths)] for lengths in of_prompts if lengths], rows)
    told = answered if margin is None else f"± {margin:.1%}, from {answered}"
    return ExpectedOutputs([answer.generated_tokens for answer in good], told, speed)


def _earlier(job: Preparation) -> ExpectedOutputs | None:
    """Lengths and speed of what a run with the same model, prompt and sampling has committed, under any schedule."""
    if job.config.fresh:  # whatever is there is about to go, and may be damaged
        return None
    storage = job.config.output_storage()
    record, wanted = read_run(storage), json.loads(json.dumps(job.description))
    if record is None or any(record.get(part) != wanted[part] for part in SAME_ANSWERS):
        return None
    commits = read_commits(storage, claim_name(record))
    totals = total(commits)
    lengths = _lengths(storage, commits)
    if not lengths or not totals.flops:
        return None
    rate = totals.seconds / (totals.flops + totals.flops_audit)
    said = f"{totals.rows - totals.errors:,} rows that run {record['fingerprint']} committed here"
    return ExpectedOutputs(lengths, said, (rate, rate, said))


def _lengths(storage: Storage, commits: Sequence[Commit]) -> list[int]:
    """Output lengths, spread evenly over an earlier run's sorted ones."""
    found: list[int] = []
    for commit in commits[:: max(1, math.ceil(len(commits) / MOST_FILES))]:
        with open_rows(storage, commit) as stream:
            rows = pq.read_table(stream, columns=["generated_tokens", "error"])
        found += rows.filter(pa.compute.is_null(rows["error"]))["generated_tokens"].to_pylist()
    found.sort()
    if len(found) <= LENGTHS:
        return found
    return [found[round((index + 0.5) * len(found) / LENGTHS - 0.5)] for index in range(LENGTHS)]


def _margin(runs: Sequence[Sequence[float]], rows: int | None) -> float | None:
    """Half of the 95 % interval of a mean from runs drawn without replacement from so many rows, or from any number,
    as a share of the mean.

    Runs are what varies independently, not rows: neighbours are often alike. None where one run says nothing of others.
    """
    count = sum(map(len, runs))
    mean = sum(map(sum, runs)) / count
    k = len(runs)
    if count == rows or not mean:
        return 0.0  # nothing is uncertain where all rows were drawn
    if k < 2:
        return None
    left = 1.0 if rows is None else math.sqrt(max(0, rows - count) / (rows - 1))
    off = sum((sum(run) - mean * len(run)) ** 2 for run in runs) * k / (k - 1)
    return _t(k - 1) * math.sqrt(off) / count / mean * left


def _t(freedom: int) -> float:
    """Student's t, 97.5th percentile, of so many degrees of freedom; from 11 on by Fisher's expansion."""
    few = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    return few[freedom - 1] if freedom <= len(few) else 1.96 + 2.372 / freedom + 2.82 / freedom**2
