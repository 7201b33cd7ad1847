"""The engine's face: load a model once, generate batches under a schedule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Self, TypeVar

import torch

from engine.checkpoints import checkpoint
from engine.checkpoints.tokenizer import Tokenizer
from engine.checkpoints.weight_files import Weights
from engine.decoding.early_exit import EarlyExit, ExitStream
from engine.decoding.feeding import Named, feed, named
from engine.decoding.generation import Generation
from engine.decoding.lanes import Lanes, lanes_for
from engine.decoding.sampling import Sampling
from engine.decoding.stats import BatchStats
from engine.decoding.stopping import Stopping
from engine.decoding.stream import ORDERED_TOGETHER, Context, Queue, Stream
from engine.errors import ModelError, PromptError, ScheduleError
from engine.forward.compiled_parts import compile_bridge, compile_head, compile_prompt_bridge
from engine.forward.ledger import Ledger
from engine.forward.operations import Compiled, Observe
from engine.forward.prompt_pass import FULL_DEPTH, PromptPass, StoppedPrompts
from engine.forward.quality import Scores, score, similarity
from engine.forward.teacher_forcing import Answer, AnswerPass, KeptPrompts
from engine.kernels import Kernels, kernels_for
from engine.memory import SHARE, free_bytes, keep_freed_memory, rows_that_fit
from engine.models.decoder import Decoder
from engine.models.families import family_of
from engine.parts.bridge import Bridge
from engine.parts.unit import Unit
from engine.schedules.schedule import Plateau, PromptPlan, Schedule
from engine.shape import ModelShape

AHEAD = ORDERED_TOGETHER + 1  # batches: one that runs, and those that are put in order together

Part = TypeVar("Part")
Ready = TypeVar("Ready")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def describe(model: str) -> ModelShape:
    """A model's shape from its config, before any weight is read. Raises ModelError."""
    config = checkpoint.read_config(model)
    return family_of(config).shape(config)


def default_dtype(device: torch.device) -> str:
    """What "auto" means on a device."""
    if device.type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"


def resolve_device(device: str) -> torch.device:
    """ "auto" takes a GPU if there is one, else the CPU. Raises ModelError for what names no device."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ModelError(f"device {device!r} is not known: use auto, cpu, cuda or cuda:N")
    return found


def check_device(device: str) -> None:
    """Raises ModelError for a GPU that this process does not see."""
    found, gpus = resolve_device(device), torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= gpus:
        raise ModelError(f"device {device!r} is not there (this process sees {gpus} GPUs): use --device cpu or auto")


def resolve_dtype(device: str, dtype: str) -> str:
    """The precision that a device and a dtype, each of which may be "auto", mean here. Raises ModelError."""
    if dtype == "auto":
        check_device(device)
        dtype = default_dtype(resolve_device(device))
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known: use auto, {', '.join(DTYPES)}")
    return dtype


class Engine:
    """One model on one device."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.decoder, self.tokenizer, self.device, self.shape = decoder, tokenizer, device, decoder.shape
        self._kernels, self._dtype, self._kept = kernels, dtype, kernels.kept or dtype
        self._compiled = Compiled()  # of the last schedules
        self._prompts = PromptPass(decoder, kernels, device)

    @classmethod
    def load(
        cls,
        model: str,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        kernels: Kernels | None = None,
        now: datetime | None = None,
    ) -> Self:
        """Load a model.

        Args:
            model: a Hugging Face checkpoint directory, a hub id, a GGUF file, or "smollm2-135m-instruct" (packaged).
            device: "auto" takes a GPU if there is one, else the CPU.
            dtype: "float32", "bfloat16" or "float16"; "auto" is float32 on a CPU, bfloat16 on a GPU, float16
                on one too old to compute in bfloat16 (before Ampere). On a CPU that multiplies bfloat16 numbers
                hidden states and logits are not of these, but float32.
            threads: CPU threads of this process; default torch's own choice.
            kernels: default the fastest for device and dtype.
            now: as for `Tokenizer`.

        Raises:
            ModelError: no such model, or one this engine cannot run; a device that is not there.
        """
        check_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        where, precision = resolve_device(device), DTYPES[resolve_dtype(device, dtype)]
        directory = checkpoint.prepare(model)
        config: Any = checkpoint.read_config(str(directory))
        chosen = kernels or kernels_for(where, precision)
        precision = chosen.states or precision
        family = family_of(config)
        if precision == torch.float16 and config.model_type.startswith("gemma"):  # which was trained in bfloat16
            raise ModelError(f"model {model!r} overflows in float16: use --dtype float32, or bfloat16")
        with torch.no_grad():  # no inference tensors: bridges are trained through these weights
            weights = Weights(directory, precision)
            weights.check_shapes(config)
            decoder = family.decoder(config, family.shape(config), weights, chosen, where)
        if where.type == "cpu":
            keep_freed_memory()
        else:
            # Torch prefers cuDNN's attention in half precision on recent GPUs. It plans anew for each shape, in tenths
            # of a second, and here shapes change from pass to pass.
            torch.backends.cuda.enable_cudnn_sdp(False)
        return cls(decoder, Tokenizer(directory, now), chosen, precision, where)

    def share_prefix(self, tokens: Sequence[int]) -> int:
        """Compute, once, tokens that prompts to come begin with, such as a job's instruction; none forgets the last.

        Prompts that begin with them then compute only their other tokens. At full depth they have the same
        generations; schedules that change prompts leave these tokens as they are. Costs 2 x p x kv_heads x head_dim
        numbers of memory per layer for p tokens.

        Returns:
            The FLOPs that it took; 0 where they can't be shared: they fill the context, or keys depend on what follows.
        """
        with torch.inference_mode():
            return self._ledger(None).prefix(len(tokens)) if self._prompts.share(tokens) else 0

    @property
    def shared_tokens(self) -> int:
        """How many tokens `share_prefix` has computed for prompts to come."""
        return len(self._prompts.prefix.tokens)

    def decoding(
        self, sampling: Sampling | None = None, schedule: Schedule | None = None, batch_size: int = 32
    ) -> Stream | Lanes:
        """An open stream: prompts are added at any time, each step takes rows a token on.

        A sample's tokens depend on its prompt, sampling, schedule and id, not on who shares its passes, nor on when it
        enters (beyond rounding). Raises ScheduleError, and ValueError for a batch_size below 1.
        """
        ledger = self._ledger(schedule)
        context = self._context(sampling or Sampling(), self.compiled(ledger.schedule))
        memory, copies = int(SHARE * free_bytes(self.device)), context.sampling.samples_per_prompt
        lanes = lanes_for(self.device, batch_size, copies)
        if lanes == 1:
            return Stream(context, ledger, batch_size, memory)
        queue = Queue(ORDERED_TOGETHER * batch_size, lanes)
        seats = [batch_size // lanes + (lane < batch_size % lanes) for lane in range(lanes)]
        return Lanes([Stream(context, ledger, each, memory // lanes, queue) for each in seats], copies)

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling: Sampling | None = None,
        schedule: Schedule | None = None,
        batch_size: int = 32,
        sample_ids: Iterable[str] | None = None,
        on_batch: Callable[[BatchStats], None] | None = None,
    ) -> Iterator[Generation]:
        """Generate for every prompt: rows enter as others end, so that as many run as there are seats.

        Prompts are taken as room for them comes near, five batches of them ahead, generations come as rows end, so
        neither have an end to have; `Generation.index` says whose they are. No pass is made while the next prompt is
        waited for: where they come slowly, or depend on what was generated, take `decoding`.

        Args:
            prompts: token ids, or raw text (`engine.checkpoints.tokenizer.encode_chat` renders a chat).
            sampling: default greedy.
            schedule: default full depth.
            batch_size: most rows that run together.
            sample_ids: name each prompt's random stream; default its position in the call.
            on_batch: called whenever rows have ended, and about once a second, with what the passes since the last
                call cost.

        Raises:
            ScheduleError, ValueError: the schedule does not fit the model, batch_size is off; before anything runs.
            PromptError, ValueError: a prompt is empty or does not fit the context, there are more prompts than
                sample_ids, or fewer; when it is taken.
        """
        stream = self.decoding(sampling, schedule, batch_size)
        return feed(stream, self._named(prompts, sample_ids), AHEAD * batch_size, on_batch)

    def generate_each(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | None,
        schedules: Sequence[Schedule | None],
        batch_size: int = 32,
        sample_ids: Sequence[str] | None = None,
        on_batch: Callable[[int, BatchStats], None] | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """Generate for every prompt under every schedule: (index of the schedule, generation).

        The same generations as a `generate` call per schedule, but prompts are computed once, in batches: with long
        prompts and short answers that is most of the work. `on_batch` is told the schedule's index too, and of whole
        batches. Other arguments and errors as for `generate`.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        ledgers = [self._ledger(schedule) for schedule in schedules]
        context = self._context(sampling or Sampling(), self.compiled(*(ledger.schedule for ledger in ledgers)))
        return self._run_each(context, self._named(prompts, sample_ids), ledgers, batch_size, on_batch)

    def generate_with_exits(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        rule: EarlyExit,
        batch_size: int = 32,
        sample_ids: Sequence[str] | None = None,
        on_confidences: Callable[[Sequence[float]], None] | None = None,
    ) -> Iterator[Generation]:
        """Generate with every token leaving at a layer of its own: for comparison, see `engine.decoding.early_exit`.

        FLOPs and mean depth are those of the layers that each token really ran. `on_confidences` is given what the
        first check found for every decode token. Errors as for `generate`.
        """
        stream = ExitStream(rule, self._context(sampling, Compiled()), self._ledger(None), batch_size)

        def tell(_: BatchStats) -> None:
            if on_confidences is not None:
                on_confidences(stream.confidences)
            stream.confidences = []

        return feed(stream, self._named(prompts, sample_ids), AHEAD * batch_size, tell)

    def unit_similarity(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> dict[Unit, float]:
        """Mean cosine similarity of every unit's input and output at full depth, over the decode steps of answers."""
        with torch.inference_mode():
            return similarity(self._prompts, _pairs(prompts, answers))

    @property
    def item_sizes(self) -> tuple[int, int]:
        """Bytes of a number of keys and values, and of hidden states."""
        return self._kept.itemsize, self._dtype.itemsize

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        schedules: Sequence[Schedule] = (),
        others: Sequence[Sequence[Sequence[int]]] = (),
    ) -> Scores:
        """How far each schedule's next-token distributions are from full depth's, teacher-forced on the tokens that
        full depth generated for each prompt, and how likely full depth finds these and the others' answers.

        One pass over the prompts serves all of that. Answers include the end-of-sequence token. Raises ScheduleError,
        and PromptError for an empty prompt.
        """
        for schedule in schedules:
            schedule.check_fits(self.shape)
        own, *theirs = (_pairs(prompts, row) for row in (answers, *others))
        with torch.inference_mode():
            return score(self._prompts, own, schedules, self.compiled(*schedules), theirs)

    def fitting_batch_size(
        self, prompt_tokens: int, sampling: Sampling | None = None, schedule: Schedule | None = None
    ) -> int:
        """Most rows, at least 1, that decode together in the memory free now and still gain from it, with the longest
        prompt of so many tokens.
        """
        new_tokens = (sampling or Sampling()).max_new_tokens
        schedule = schedule or Schedule.full_depth(self.shape.layers)
        self.compiled(schedule)  # before the free memory is measured: an adapter takes some
        sizes = (prompt_tokens, new_tokens, self._kept.itemsize)
        return rows_that_fit(free_bytes(self.device), self.device.type, self.shape, schedule, *sizes)

    def _ledger(self, schedule: Schedule | None) -> Ledger:
        schedule = Schedule.full_depth(self.shape.layers) if schedule is None else schedule
        if not isinstance(schedule, Schedule):
            raise ScheduleError(f"{schedule!r} is no schedule: read one by Schedule.read(path)")
        schedule.check_fits(self.shape)
        return Ledger(self.shape, schedule)

    def compiled(self, *schedules: Schedule) -> Compiled:
        """What the schedules bring along, on this device; parts of the call before are kept where they are the same.

        Raises ScheduleError for an adapter that was trained for another model.
        """
        if all(schedule.is_full_depth for schedule in schedules):
            return Compiled()  # an audit in between forgets nothing
        kept, where = self._compiled, (self._kernels, self._dtype, self.device)

        def ready(
            parts: Iterable[Part | None], known: Mapping[Part, Ready], make: Callable[[Part], Ready]
        ) -> dict[Part, Ready]:
            return {part: known.get(part) or make(part) for part in dict.fromkeys(parts) if part is not None}

        with torch.inference_mode():
            self._compiled = Compiled(
                ready((b for s in schedules for b in s.all_bridges), kept.bridges, lambda b: compile_bridge(b, *where)),
                ready((s.adapter for s in schedules), kept.adapted, self.decoder.adapted),
                ready((s.head_preview for s in schedules), kept.heads, lambda h: compile_head(h, self.decoder, *where)),
                ready(
                    (s.prompt_bridge for s in schedules),
                    kept.prompt_maps,
                    lambda stop: compile_prompt_bridge(stop, self.shape, *where),
                ),
            )
        return self._compiled

    def teacher_forced(
        self, answers: Sequence[Answer], plan: PromptPlan = FULL_DEPTH, compiled: Compiled | None = None
    ) -> AnswerPass:
        """Known answers to prompts that run a plan with what is compiled for it, to be passed through the layers under
        any schedule that has this plan.
        """
        kept = KeptPrompts(self._prompts, [answer.prompt for answer in answers], plan, compiled)
        return AnswerPass(kept, answers)

    def stop_prompts(
        self, prompts: Sequence[Sequence[int]], first: int, skips: Bridge | None = None, observe: Observe | None = None
    ) -> StoppedPrompts:
        """As `PromptPass.stop`, by a bridge over a block."""
        skipped = None
        if skips is not None:
            skipped = skips.block, compile_bridge(skips, self._kernels, self._dtype, self.device)
        return self._prompts.stop(prompts, first, skipped, observe)

    def observe_prompts(self, prompts: Sequence[Sequence[int]], observe: Observe) -> None:
        """Pass prompts through all layers, all in one pass; `observe` as for `PromptPass.run`."""
        self._prompts.run(prompts, lambda *_: None, observe=observe)

    def _named(self, prompts: Iterable[str | Sequence[int]], sample_ids: Iterable[str] | None) -> Named:
        return named(prompts, sample_ids, self.tokenizer.encode)

    def _run_each(
        self,
        context: Context,
        prompts: Named,
        ledgers: Sequence[Ledger],
        batch_size: int,
        on_batch: Callable[[int, BatchStats], None] | None,
    ) -> Iterator[tuple[int, Generation]]:
        alike: dict[PromptPlan, list[int]] = {}  # indices of ledgers
        for index, ledger in enumerate(ledgers):
            alike.setdefault(ledger.schedule.prompt_plan, []).append(index)
        waiting = sorted(prompts, key=lambda each: -len(each[2]))
        whole, longest = Schedule.full_depth(self.shape.layers), max((len(each[2]) for each in waiting), default=0)
        sizes = (longest, context.sampling.max_new_tokens, self._kept.itemsize)
        # Each row is in the cache that prompts fill and in a schedule's copy.
        fitting = rows_that_fit(
            free_bytes(self.device), self.device.type, self.shape, whole, *sizes, most=batch_size, caches=2
        )
        together = max(1, fitting // context.sampling.samples_per_prompt)  # prompts of a batch
        seats = max(batch_size, context.sampling.samples_per_prompt)
        for first in range(0, len(waiting), together):
            for plan, indices in alike.items():
                skipped = () if plan.bridge is None or plan.bridge.keeps_skipped else plan.bridge.skipped_units
                plateaus = (Plateau(0, len(skipped)),)
                whole = Schedule(self.shape.layers, skipped, plateaus, prompt_bridge=plan.bridge, adapter=plan.adapter)
                base = Stream(context, self._ledger(whole), seats)
                for place, sample_id, tokens in waiting[first : first + together]:
                    base.add(tokens, sample_id, place)
                logits = base.prefill()
                for index in indices:
                    fork = base.fork(ledgers[index])
                    done = fork.begin(logits)
                    while fork.unfinished:
                        done += fork.step()
                    if on_batch is not None:
                        on_batch(index, fork.take_stats())
                    yield from ((index, generation) for generation in done)

    def _context(self, sampling: Sampling, compiled: Compiled) -> Context:
        return Context(self._prompts, compiled, Stopping(sampling, self.tokenizer), self._kept)


def _pairs(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Answer]:
    """Raises PromptError for an empty prompt."""
    if not all(prompts):
        raise PromptError("a prompt is empty")
    return [Answer(prompt, tokens) for prompt, tokens in zip(prompts, answers, strict=True)]
