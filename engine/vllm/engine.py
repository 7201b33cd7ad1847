"""vLLM behind the face of our engine: prompts in, generations out, the ledger beside them."""

import gc
import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engine.checkpoints import checkpoint
from engine.checkpoints.digests import cache_directory
from engine.checkpoints.tokenizer import Tokenizer
from engine.checkpoints.weight_files import Weights, check_unambiguous
from engine.decoding.feeding import feed, named
from engine.decoding.generation import Generation, Sample, generation_of, samples_of
from engine.decoding.sampling import Sampling
from engine.decoding.stats import BatchStats
from engine.decoding.stopping import Stopping
from engine.engine import Engine, check_device, resolve_device, resolve_dtype
from engine.errors import NOT_NUMBERS, ModelError, ScheduleError, StreamLost, brief
from engine.forward.ledger import Ledger
from engine.forward.prompt_pass import shared_tokens
from engine.forward.quality import Scores
from engine.models.decoder import has_own_head
from engine.models.families import family_of
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape
from engine.vllm.plugin import FULL_DEPTH, SETTING, SHARED, register

log = logging.getLogger(__name__)

AUTO_ROWS = 256  # that decode together unless told otherwise, as in vLLM
PASS_TOKENS = 4096  # of a pass in vLLM at the fewest, unless it is told otherwise: on CPUs, on GPUs more
CPU_BLOCK = 32  # the least that its attention is fast with
START_AGAIN_S = 10.0
WAITING = 4  # times as many rows as decode together are with vLLM, so that none of its passes wants for prompts


@dataclass
class _Running:
    """vLLM, started."""

    llm: Any
    schedule: Schedule
    seats: int  # rows that it lets run together
    whose: dict[str, "VllmDecoding"] = field(default_factory=dict)  # its requests
    names: Iterator[str] = field(default_factory=lambda: map(str, count()))  # of requests to come
    has_computed_prefix: bool = False  # that of `VllmEngine.share_prefix`
    broken: bool = False
    live: Counter["VllmDecoding | None"] = field(default_factory=Counter)  # rows of the last pass, by stream

    def __post_init__(self) -> None:
        """Count the rows of passes, and have preemptions and logits that are no numbers told to the row's stream."""
        preempt, update = self.scheduler._preempt_request, self.scheduler.update_from_output

        def name_of(request_id: str) -> str:
            return request_id.split("-")[0]  # vLLM puts something random behind ours

        def preempt_and_tell(request: Any, *args: Any, **kwargs: Any) -> None:
            name = name_of(request.request_id)
            if (decoding := self.whose.get(name)) is not None:
                decoding.preempted(name, request.num_computed_tokens)
            preempt(request, *args, **kwargs)

        def update_and_tell(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.live = Counter(self.whose.get(name_of(request)) for request in scheduled.num_scheduled_tokens)
            updated = update(scheduled, *args, **kwargs)
            for output in chain.from_iterable(outputs.outputs for outputs in updated.values()):
                if output.num_nans_in_logits and (decoding := self.whose.get(name_of(output.request_id))) is not None:
                    decoding.not_numbers = True
            return updated

        # Of this process: see `VllmEngine`.
        self.scheduler._preempt_request, self.scheduler.update_from_output = preempt_and_tell, update_and_tell

    @property
    def ahead(self) -> bool:
        """Whether it prepares a pass while the one before still runs; on CPUs it never does."""
        is_so: bool = self.llm.vllm_config.scheduler_config.async_scheduling
        return is_so

    @property
    def scheduler(self) -> Any:
        return self.llm.engine_core.engine_core.scheduler

    @property
    def cache_bytes(self) -> int:
        """That rows take in its cache now, on one device."""
        tensors = self.scheduler.kv_cache_config.kv_cache_tensors  # of one allocation, each with its size
        used: float = self.scheduler.kv_cache_manager.usage * max(tensor.size for tensor in tensors)
        return round(used)

    def can(self, schedule: Schedule, rows: int) -> bool:
        """Run rows under a schedule; at full depth it can under any."""
        return not self.broken and rows <= self.seats and (schedule.is_full_depth or schedule == self.schedule)


class VllmEngine:
    """One model in vLLM, in this process, under one schedule and at full depth."""

    def __init__(
        self, model: str, dtype: str = "auto", device: str = "auto", threads: int | None = None, **options: Any
    ) -> None:
        """Nothing but the tokenizer is loaded before the first call: only that says under which schedule.

        Args:
            model: as for `Engine.load`.
            dtype, device: as there; the device has to be the one that vLLM is built for.
            threads: CPU threads of this process, as there.
            options: of vLLM's `EngineArgs`, such as tensor_parallel_size, gpu_memory_utilization, quantization,
                kv_cache_dtype.

        Raises:
            ModelError: no such model, or vLLM is not installed.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        # On CPUs vLLM would bind its threads to the first cores, and every replica on a machine to the same ones.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # thirty lines for each start, unless they are asked for
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what goes wrong is raised here
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # V2 refuses logits processors such as ours, full depth or not
        os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"  # of such a row it would make an answer all the same
        try:
            import vllm.config  # noqa: F401
        except ImportError as error:
            raise ModelError(f"vLLM cannot be imported ({error}): pip install '.[vllm]' in this project") from None
        check_device(device)
        directory = checkpoint.prepare(model)
        config: Any = checkpoint.read_config(str(directory))
        family = family_of(config)
        self.shape: ModelShape = family.shape(config)
        _check_read_alike(directory, config, family.decoder.prefix)
        _check_computed_alike(config, options.get("max_model_len", self.shape.context))
        self._model, self._directory = model, directory
        self._device, self._dtype = resolve_device(device).type, resolve_dtype(device, dtype)
        if index := resolve_device(device).index:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            card = seen.split(",")[index] if seen else index
            raise ModelError(
                f"vLLM takes the first GPU that a process sees: set CUDA_VISIBLE_DEVICES={card} and use --device cuda"
            )
        # On CPUs blocks have 128 tokens by default, and an instruction that prompts share is found in whole ones alone.
        # Compiling wants a C++ compiler there.
        on_cpu = {"block_size": CPU_BLOCK, "enforce_eager": True} if self._device == "cpu" else {}
        # Beside the files that our engine reads there may be Mistral's own, which vLLM prefers unless told.
        read = {"config_format": "hf", "load_format": "hf"}
        self._options: dict[str, Any] = {"max_model_len": self.shape.context, **read, **on_cpu, **options}
        self.tokenizer = Tokenizer(directory)
        self._running: _Running | None = None
        self._prefix: tuple[int, ...] = ()

    def share_prefix(self, tokens: Sequence[int]) -> int:
        """As `Engine.share_prefix`, of rows to come. vLLM finds what they share in its cache, but for a last part of a
        block: what is computed again is told beside the ledger (`BatchStats.flops_padding`).
        """
        fits = len(tokens) < self._options["max_model_len"] and all(0 <= each < self.shape.vocab for each in tokens)
        self._prefix = tuple(tokens) if fits else ()
        if self._running is not None:
            self._running.has_computed_prefix = False
        if "_beside" in vars(self):
            self._beside.share_prefix(self._prefix)
        return Ledger(self.shape, Schedule.full_depth(self.shape.layers)).prefix(len(self._prefix))

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling: Sampling | None = None,
        schedule: Schedule | None = None,
        batch_size: int = 32,
        sample_ids: Iterable[str] | None = None,
        on_batch: Callable[[BatchStats], None] | None = None,
    ) -> Iterator[Generation]:
        """As `Engine.generate`."""
        rows = self.decoding(sampling, schedule, batch_size)
        return feed(rows, named(prompts, sample_ids, self.tokenizer.encode), WAITING * batch_size, on_batch)

    def decoding(
        self, sampling: Sampling | None = None, schedule: Schedule | None = None, batch_size: int = 32
    ) -> "VllmDecoding":
        """An open stream, as `Engine.decoding`; another may be open if it is at full depth. vLLM starts anew, and rows
        under way are lost, under another schedule or with more rows than it was started for.

        Raises ScheduleError if the schedule does not fit the model, ModelError if vLLM does not start; ValueError for
        a batch_size below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        schedule = (schedule or Schedule.full_depth(self.shape.layers)).with_whole_head
        schedule.check_fits(self.shape)
        running = self._running
        if running is not None and not running.broken and schedule.is_full_depth and not running.schedule.is_full_depth:
            batch_size = min(batch_size, running.seats)  # beside rows under a schedule: no reason to start anew
        if running is None or not running.can(schedule, batch_size):
            self.close()
            running = self._running = _Running(self._started(schedule, batch_size), schedule, batch_size)
        stopping = Stopping(sampling or Sampling(), self.tokenizer)
        ledger, context = Ledger(self.shape, schedule), self._options["max_model_len"]
        return VllmDecoding(running, stopping, ledger, context, self._prefix)

    def fitting_batch_size(
        self, prompt_tokens: int, sampling: Sampling | None = None, schedule: Schedule | None = None
    ) -> int:
        """As many as vLLM takes: what does not fit its cache waits."""
        return AUTO_ROWS

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        schedules: Sequence[Schedule] = (),
        others: Sequence[Sequence[Sequence[int]]] = (),
    ) -> Scores:
        """As `Engine.score`, and by one, on the CPU: vLLM has no pass over known answers under a schedule."""
        return self._beside.score(prompts, answers, [schedule.with_whole_head for schedule in schedules], others)

    def close(self) -> None:
        """End vLLM, as far as one process can."""
        if self._running is not None:
            self._running.broken = True
            # While the model is there: what is compiled of it would keep it, and its memory, for good.
            if (forget_compiled := getattr(self._running.llm, "_finalizer", None)) is not None:
                with suppress(Exception):
                    forget_compiled()
            self._running.llm.engine_core.shutdown()
            self._running = None
            gc.collect()

    @cached_property
    def _beside(self) -> Engine:
        engine = Engine.load(self._model, "cpu", "float32")
        engine.share_prefix(self._prefix)
        return engine

    def _started(self, schedule: Schedule, rows: int) -> Any:
        """vLLM's engine, at the second try if need be: what had the device's memory before may not have left yet."""
        try:
            return self._start(schedule, rows)
        except ScheduleError:
            raise
        except Exception as error:
            first = brief(error)
            log.warning("vLLM does not start (%s): once more in %g s", first, START_AGAIN_S)
        gc.collect()
        time.sleep(START_AGAIN_S)
        try:
            return self._start(schedule, rows)
        except Exception as error:  # vLLM's own and its libraries', which name what is wrong in their words
            before = "" if brief(error) == first else f" (the first time: {first})"  # whose memory may still be taken
            raise ModelError(f"vLLM does not start with model {self._model!r}: {error}{before}") from error

    def _start(self, schedule: Schedule, rows: int) -> Any:
        """vLLM's engine."""
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        register()  # vLLM's own look at entry points misses it where the project is not installed, but imported
        setting: dict[str, Any] = {}
        if not schedule.is_full_depth:
            setting = {"additional_config": {SETTING: str(_kept(schedule))}}
        if rows > (self._options.get("max_num_batched_tokens") or PASS_TOKENS):
            setting["max_num_batched_tokens"] = rows  # vLLM wants room for a token of each in a pass
        args = EngineArgs(
            model=str(self._directory),
            skip_tokenizer_init=True,
            dtype=self._dtype,
            max_num_seqs=rows,
            logits_processors=["engine.vllm.sampling:OurSampling"],
            disable_log_stats=True,
            **(self._options | setting),
        )
        return LLMEngine.from_engine_args(args, UsageContext.LLM_CLASS)  # passes as large as vLLM has for bulk work


def _check_read_alike(directory: Path, config: Any, prefix: str) -> None:
    """Raises ModelError for a checkpoint of which vLLM would take other weights than our engine, that calibrates and
    judges.
    """
    check_unambiguous(directory)
    quantised = getattr(config, "quantization_config", None) is not None  # which our engine never reads
    if not config.tie_word_embeddings or quantised:
        return
    if has_own_head(Weights(directory, torch.float32), f"{prefix}.embed_tokens.weight"):
        raise ModelError(
            f"the model in {str(directory)!r} has a head of its own, but by its config the embedding is it, as vLLM "
            'has it: set "tie_word_embeddings": false in its config.json'
        )


def _check_computed_alike(config: Any, longest: int) -> None:
    """Raises ModelError for a model of which vLLM computes something else than transformers and our engine, with rows
    of so many tokens at the most.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    what = None
    if config.model_type in ("qwen3", "mistral") and getattr(config, "attention_bias", False):
        what = f"leaves out biases of attention that the config of this {config.model_type} model names"
    elif rope.get("rope_type") == "longrope" and longest > rope["original_max_position_embeddings"]:
        original = rope["original_max_position_embeddings"]
        what = f"scales rotary positions of rows up to {original} tokens as those of rows of {longest} (longrope)"
    if what is not None:
        raise ModelError(f"vLLM {what}: use --engine torch")


def _kept(schedule: Schedule) -> Path:
    """A directory with a schedule, named by its content: by that name vLLM finds again what it has compiled for it."""
    described = schedule.to_json()  # its tensors too, whose digests stand there
    target = cache_directory() / "schedules" / hashlib.sha256(described.encode()).hexdigest()[:16]
    with suppress(ScheduleError):  # not there yet, or of a cache that somebody has cleaned files of
        if Schedule.read(target).to_json() == described:
            return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent) as scratch:
            schedule.write(Path(scratch) / "whole")
            if target.is_dir():
                os.rename(target, Path(scratch) / "damaged")
            os.rename(Path(scratch) / "whole", target)
    except OSError as error:
        if not target.is_dir():  # else another process was first
            way_out = "set SKIPDECODE_CACHE to a directory that can"
            raise ScheduleError(f"{str(target)!r} cannot be written ({error}): {way_out}") from None
    return target


class VllmDecoding:
    """Rows under way in vLLM, under one sampling and schedule; more may be added at any time."""

    def __init__(
        self, running: _Running, stopping: Stopping, ledger: Ledger, context: int, prefix: Sequence[int]
    ) -> None:
        """An empty one, of rows of so many tokens at the most, some of whose prompts begin with a prefix."""
        self._running, self._llm = running, running.llm
        self._stopping, self._ledger, self._context, self._prefix = stopping, ledger, context, prefix
        # At full depth in an engine that has a schedule.
        self._whole = ledger.schedule.is_full_depth and not running.schedule.is_full_depth
        self._samples: dict[str, Sample] = {}  # by request
        self._done: list[Generation] = []  # not told yet: another stream's pass may have ended them
        self.not_numbers = False  # whether the logits of one of its rows are none
        self._stats, self._asked = BatchStats(), time.perf_counter()

    @property
    def unfinished(self) -> int:
        """Generations still to come."""
        return len(self._samples) + len(self._done)

    def take_stats(self) -> BatchStats:
        """What passes have cost since this was last asked; their seconds, once rows end, by FLOPs of these."""
        stats, self._stats = self._stats, BatchStats()
        flops = stats.prefill_seconds + stats.decode_seconds  # so far
        if not flops:
            return stats
        now = time.perf_counter()
        seconds, self._asked, share = now - self._asked, now, stats.prefill_seconds / flops
        return replace(stats, prefill_seconds=share * seconds, decode_seconds=(1 - share) * seconds)

    def add(self, prompt: Sequence[int], sample_id: str, index: int) -> None:
        """As `Decoding.add`."""
        sampling, vocab = self._stopping.sampling, self._ledger.shape.vocab
        for sample in samples_of(prompt, sample_id, index, sampling, self._context, vocab):
            sample.shared_prefix, sample.shares_prompt = shared_tokens(self._prefix, prompt), sample.copy > 0
            request = next(self._running.names)
            self._llm.add_request(request, {"prompt_token_ids": list(prompt)}, self._params(sample))
            self._samples[request], self._running.whose[request] = sample, self

    def step(self) -> list[Generation]:
        """One pass; the generations that ended in it. Raises FloatingPointError as `Stream` does."""
        whose, runs = self._running.whose, not self._done
        if self._running.broken and runs:
            # By another stream's pass, or ended for another schedule: rows of that pass would wait for ever.
            raise StreamLost("vLLM has ended under rows that it ran: another stream goes on with them")
        try:
            outputs = self._llm.step() if runs else []
            outputs = [output for output in outputs if output.request_id in whose]
            stopped = [output.request_id for output in outputs if whose[output.request_id]._take(output)]
            if stopped:
                self._llm.abort_request(stopped)
        except Exception:
            self._running.broken = True  # whatever state it is in
            raise
        if self.not_numbers:
            # Attention on CPUs looks, times zero, at what rows have left in the cache, and that is still no number.
            self._running.broken |= self._llm.vllm_config.device_config.device_type == "cpu"
            raise FloatingPointError(NOT_NUMBERS)
        finished, self._done = self._done, []
        self._stats += BatchStats(
            samples=len(finished),
            prompt_tokens=sum(each.prompt_tokens - each.shared_prefix_tokens for each in finished if not each.sample),
            generated_tokens=sum(each.generated_tokens for each in finished),
            steps=1,
            live_rows=self._running.live[self] if runs else 0,
            seats=self._running.seats if runs else 0,
            cache_course=(self._running.cache_bytes,),
            prefill_seconds=sum(each.flops_prompt for each in finished),
            decode_seconds=sum(each.flops_decode for each in finished),
        )
        return finished

    def preempted(self, request: str, tokens: int) -> None:
        """One of its rows is, after so many of its tokens: they are computed again, unless a prefix is found."""
        sample = self._samples[request]
        prompt = min(tokens, len(sample.prompt))
        shared = min(prompt, sample.shared_prefix)
        lost = self._ledger.prefix(shared) + self._ledger.decode(len(sample.prompt), tokens - prompt + 1)
        if prompt > shared:
            lost += self._ledger.prompt_layers(prompt, shared)
        self._stats += BatchStats(preemptions=1, flops_padding=lost)

    def close(self) -> None:
        """Leave what is under way."""
        with suppress(Exception):  # if vLLM has broken, what broke it is to be told
            self._llm.abort_request(list(self._samples))
        for request in self._samples:
            self._running.whose.pop(request, None)
        self._samples.clear()

    def _take(self, output: Any) -> bool:
        """Note what a pass has brought a row; whether vLLM is to be told that it has ended."""
        sample = self._samples[output.request_id]
        for token in output.outputs[0].token_ids[len(sample.tokens) :]:
            sample.tokens.append(token)
            sample.ended = self._stopping.ends(sample.tokens)
            if sample.finished:
                break
        if not sample.finished:
            if output.finished:
                raise RuntimeError(f"vLLM has ended a row before its end: {output.outputs[0].finish_reason}")
            return False
        again = self._again(sample, output.num_cached_tokens or 0)
        self._stats += BatchStats(flops_padding=again + self._too_far(sample))
        del self._samples[output.request_id], self._running.whose[output.request_id]
        self._done.append(generation_of(sample, self._stopping, self._ledger))
        return not output.finished

    def _again(self, sample: Sample, cached: int) -> int:
        """FLOPs of what others have computed, and vLLM has not found but for so many tokens of it."""
        again = max(0, self._ledger.prefix(sample.shared_prefix) - self._ledger.prefix(cached))
        if sample.shared_prefix and not cached and not self._running.has_computed_prefix:
            self._running.has_computed_prefix, again = True, 0  # what `share_prefix` has told
        if sample.shares_prompt:
            again += self._ledger.prompt(len(sample.prompt), max(cached, sample.shared_prefix))
        return again

    def _too_far(self, sample: Sample) -> int:
        """FLOPs of the pass that was prepared before vLLM knew that the row would end."""
        if not self._running.ahead or len(sample.tokens) == sample.limit:
            return 0
        lengths = len(sample.prompt), len(sample.tokens)
        return self._ledger.decode(lengths[0], lengths[1] + 1) - self._ledger.decode(*lengths)

    def _params(self, sample: Sample) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from engine.vllm.sampling import SAMPLED, describe

        # A tokenizer may name more tokens than a model has.
        eos_ids = [token for token in self._stopping.eos_ids if token < self._ledger.shape.vocab]
        extra: dict[str, Any] = {SHARED: sample.shared_prefix} | ({FULL_DEPTH: True} if self._whole else {})
        if (described := describe(self._stopping.sampling, eos_ids, sample.sample_id)) is not None:
            extra[SAMPLED] = described
        return SamplingParams(
            temperature=0.0,
            max_tokens=sample.limit,
            stop_token_ids=eos_ids,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args=extra,
        )
