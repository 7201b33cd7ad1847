"""Engine speed on a GPU, on random weights of real shapes: needs torch and transformers, nothing else of this project.

    python -m jobs.benchmark_gpu

For each shape and batch size: full depth and reduced depth against the least time that the device's own bandwidth and
arithmetic allow, measured in the same run, and against transformers, its continuous batching, and vLLM if installed.
Figures are written after every batch size, so that a run that is cut short leaves what it has.
`--device cpu --shapes tiny` tries the benchmark itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from engine import Engine, ModelError, Sampling, Schedule, ScheduleError, decode_flop_speedup, for_target_speedup
from engine.engine import DTYPES, default_dtype
from jobs.engine_benchmark.contenders import Prompts, run_engine, time_engine, time_transformers
from jobs.engine_benchmark.floor import MachineRates, decode_floor, measure_rates
from jobs.engine_benchmark.gpu_peers import VLLM, random_reference, time_continuous_batching
from jobs.engine_benchmark.host_syncs import WAITS, events_per_step
from jobs.engine_benchmark.random_model import SHAPES, RandomWeights, config_of, random_engine, random_prompts
from jobs.engine_benchmark.timing import TimedContender, Timing, compare, take_turns
from pipeline.errors import JobError
from pipeline.storage.ownership import claim_directory

PROGRAM = "benchmark_gpu"
FULL_DEPTH = "full depth"
PEERS = ("transformers", "continuous batching", "vllm")
PACKAGED = "smollm2-135m-instruct"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("benchmark_gpu: error: torch sees no CUDA device; --device cpu --shapes tiny tries it out")
        return 1
    try:
        claim_directory(options.output, PROGRAM)
    except JobError as error:
        print(f"{PROGRAM}: error: {error}")
        return 1
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    dtype = DTYPES[default_dtype(device)]
    rates = measure_rates(device, dtype)
    print(
        f"{name}: reads {rates.bytes_per_second / 1e9:.0f} GB/s, multiplies at {rates.flops_per_second / 1e12:.2f} TF/s"
    )
    report: dict[str, Any] = {
        "device": name,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": str(dtype).removeprefix("torch."),
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "rates": asdict(rates),
        "equality": greedy_equality(device),
        "results": [],
    }
    print(f"greedy tokens in float32 as on the CPU: {report['equality']}")
    path = options.output / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    for shape in options.shapes:
        for batch_size in options.batch_sizes:
            result = {"shape": shape, "batch_size": batch_size}
            try:
                result |= measure(shape, batch_size, device, dtype, rates, options)
            except (torch.OutOfMemoryError, ScheduleError) as error:
                result["error"] = str(error).splitlines()[0]
            report["results"].append(result)
            show(result)
            path.write_text(json.dumps(report, indent=1) + "\n")
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"figures: {path}")
    return 0


def measure(
    shape: str,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    rates: MachineRates,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All figures of one shape and batch size. Raises OutOfMemoryError, ScheduleError."""
    config, new_tokens = config_of(shape), options.new_tokens
    prompts = random_prompts(batch_size, options.prompt_tokens, config.vocab_size)
    # Peers first, each alone on the device: nobody's memory is taken from the others.
    contenders = [time_peer(peer, config, dtype, device, prompts, options) for peer in options.peers]
    engine = random_engine(config, RandomWeights(config, dtype, device), device)
    lengths = [(len(prompt), new_tokens) for prompt in prompts]
    schedules = {FULL_DEPTH: Schedule.full_depth(engine.shape.layers)}
    schedules |= {f"{x:g}x": for_target_speedup(x, lengths, engine.shape) for x in options.speedups}
    ours = [
        TimedContender(
            name,
            partial(time_warm, engine, prompts, new_tokens, schedule),
            decode_flop_speedup(engine.shape, schedule, lengths),
            decode_floor(rates, engine.shape, schedule, lengths, dtype.itemsize),
        )
        for name, schedule in schedules.items()
    ]
    take_turns(ours, options.rounds)
    stats = {name: run_engine(engine, prompts, new_tokens, schedule) for name, schedule in schedules.items()}
    return {
        "contenders": compare([peer for peer in contenders if peer] + ours, FULL_DEPTH),
        "cache_bytes": {name: [batch.cache_course[0], batch.cache_course[-1]] for name, batch in stats.items()},
        "flops_padding": {name: batch.flops_padding for name, batch in stats.items()},
        "events_per_step": count_events(engine, prompts, new_tokens),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def time_warm(engine: Engine, prompts: Prompts, new_tokens: int, schedule: Schedule) -> Timing:
    """The second of two runs: the first captures the graphs, as the first batch of a job does."""
    time_engine(engine, prompts, new_tokens, schedule)
    return time_engine(engine, prompts, new_tokens, schedule)


def time_peer(
    peer: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    prompts: Prompts,
    options: argparse.Namespace,
) -> TimedContender | None:
    """A peer with its timings, or None where it is not installed or fails, which is printed: it decides nothing."""
    if peer == "vllm" and importlib.util.find_spec("vllm") is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        try:
            run = _peer_run(peer, config, dtype, device, Path(scratch), prompts, options.new_tokens)
            contender = TimedContender(peer, run)
            take_turns([contender], options.rounds)
        except Exception as error:  # another project's code, on a device of its choosing
            print(f"{peer} failed: {type(error).__name__}: {error}", file=sys.stderr)
            return None
    return contender


def _peer_run(
    peer: str, config: Any, dtype: torch.dtype, device: torch.device, scratch: Path, prompts: Prompts, new_tokens: int
) -> Callable[[], Timing]:
    if peer == "vllm":
        return partial(VLLM(config, dtype, scratch).time, prompts, new_tokens)
    reference = random_reference(config, dtype, device)
    time_one = time_transformers if peer == "transformers" else time_continuous_batching
    return partial(time_one, reference, prompts, new_tokens)


def count_events(engine: Engine, prompts: Prompts, new_tokens: int) -> dict[str, float] | None:
    """Of a full-depth step; None without CUDA."""
    if engine.device.type != "cuda":
        return None

    schedule = Schedule.full_depth(engine.shape.layers)
    return events_per_step(lambda tokens: run_engine(engine, prompts, tokens, schedule), new_tokens // 2, new_tokens)


def greedy_equality(device: torch.device) -> dict[str, float | str]:
    """Share of the tokens that are the CPU's, float32: random weights, and the packaged model where it is installed."""
    config, cpu = config_of("smollm2-135m"), torch.device("cpu")
    if device.type == "cpu":
        config = config_of("tiny")
    prompts = random_prompts(8, 100, config.vocab_size)
    engines = [random_engine(config, RandomWeights(config, torch.float32, cpu), where) for where in (cpu, device)]
    found: dict[str, float | str] = {"random weights": _same_tokens(engines, prompts)}
    try:
        engines = [Engine.load(PACKAGED, str(where), "float32") for where in (cpu, device)]
        chats = [engines[0].tokenizer.encode_chat(f"Name {count} uses of a paper clip.") for count in range(2, 10)]
        found[PACKAGED] = _same_tokens(engines, chats)
    except (ModelError, ImportError) as error:
        found[PACKAGED] = str(error)
    return found


def _same_tokens(engines: Sequence[Engine], prompts: Prompts) -> float:
    first, second = (
        [g.tokens for g in sorted(engine.generate(prompts, Sampling(max_new_tokens=32)), key=lambda g: g.index)]
        for engine in engines
    )
    same = sum(a == b for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=False))
    return same / sum(map(len, first))


def show(result: dict[str, Any]) -> None:
    """A few lines for the terminal."""
    print(f"\n{result['shape']}, batch {result['batch_size']}: {result.get('error', '')}")
    for row in result.get("contenders", []):
        figures = {
            "FLOP x": row.get("decode_flop_speedup"),
            "real x": row.get("measured_speedup"),
            "realised share": row.get("realised_share"),
            "share of floor": row.get("share_of_floor"),
        }
        shown = ", ".join(f"{name} {value:.2f}" for name, value in figures.items() if value is not None)
        print(f"  {row['name']:<20} decode {row['decode_tokens_per_s']:>9,.0f} tok/s  {shown}")
    if events := result.get("events_per_step"):
        print(f"  waits of the host per step: {sum(events[name] for name in WAITS):g}  ({events})")


def _parser() -> argparse.ArgumentParser:
    # Not `jobs.command_line`: this job has to run where pydantic and the rest are not installed.
    parser = argparse.ArgumentParser(PROGRAM, description="Engine speed on a GPU.", allow_abbrev=False)
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1, cpu (default: auto)")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["qwen2.5-1.5b", "llama-3.1-8b", "opt-1.3b"])
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[64, 256])
    parser.add_argument("--speedups", nargs="*", type=float, default=[2.0, 3.0], help="decode FLOP speed-ups")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--prompt-tokens", type=int, default=960)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="times everybody runs")
    parser.add_argument("--output", type=Path, default=Path("infra/benchmarks"), help="directory for <device>.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
