"""Train schedules on the model's own answers: in this process, or in several at once on Ray."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import floor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from pydantic import Field, model_validator

from engine import Engine, ModelError, Schedule, ScheduleError, model_identity, resolve_dtype
from engine.adaptation.checkpoint import check_settings
from engine.adaptation.curve import Point, is_early_look, reachable_kl
from engine.adaptation.memory import kept_bytes, model_bytes, teacher_bytes, trained_bytes, working_bytes
from engine.adaptation.peers import Peers
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainer import Trainer
from engine.calibration.prompts import counted_prompt_bridge, fit_prompt_bridge, prompt_cut
from engine.forward.packing import packs
from engine.forward.quality import Quality
from engine.kernels import training_kernels_for
from engine.memory import LEAST_ANSWERS, check_memory, free_bytes
from jobs.answers import ANSWERS_FILE, AnswersConfig, answer_corpus, with_more_answers
from pipeline import logs
from pipeline.errors import JobError, JobStopped, last_line
from pipeline.inputs.sample_prompts import Part
from pipeline.monitoring.stage_progress import StageProgress
from pipeline.preparing.fit import made_from
from pipeline.preparing.preparation import absolute_model
from pipeline.rows.row_generator import is_out_of_memory
from pipeline.storage.ownership import claimed_at
from pipeline.storage.settings import Place, StorageConfig
from pipeline.storage.storage import absolute

CHECKPOINT_FILE = "training.safetensors"
MORE_ANSWERS_FILE = "more_answers.safetensors"
DECIDE_NOTHING = {
    *StorageConfig.model_fields,
    *("output", "target_speedup", "device", "batch_size", "threads", "ray_address", "s3_anonymous_input"),
}  # options, of what comes of a training
FITTED, FITTED_TOKENS = 600, 120_000  # prompts, and their tokens, that a prompt bridge is fitted to before training
DEFAULT = Recipe()
PATIENCE_S = 3 * 3600  # of processes with each other, for which one fits a prompt bridge; Ray's own is half an hour

log = logging.getLogger(__name__)


class AdaptModel(AnswersConfig):
    """Train calibrated schedules on the model's own answers to your prompts.

    Their bridges, prompt bridges among them, and a low-rank adapter: of the layers above for decode tokens, or, where
    prompts are bridged, of all layers for prompts too.
    """

    schedule: Place | None = Field(
        None,
        description="directory or URL of a calibrated schedule, or of several: these are trained together, with one "
        "adapter that serves all of them; without any, answers run every layer, and --prompt-layers says what prompts "
        "run: where these are long, they are all that counts",
    )
    target_speedup: float | None = Field(
        None, ge=1, description="train one of several schedules alone, the one made for this or that just reaches it"
    )
    output: Place = Field(
        description="local directory for what is trained, like that of schedule; a rerun goes on there"
    )
    part: Part = "train"
    prompts: int = Field(
        1500, ge=LEAST_ANSWERS, description="prompts to draw, by the seed; the model answers each of them"
    )
    answers_per_prompt: int = Field(
        1, ge=1, description="answers to learn from for each prompt; those beyond the first are drawn at temperature 1"
    )
    held_out: float = Field(0.1, gt=0, lt=0.5, description="share of them that is judged by, not trained on")
    steps: int = Field(
        DEFAULT.steps, ge=1, description="updates at most; past half of them it ends when judgements stop improving"
    )
    learning_rate: float = Field(DEFAULT.learning_rate, gt=0, description="highest of the warm-up and cosine")
    prompt_layers: int | None = Field(
        None,
        ge=1,
        description="give the schedules a prompt bridge, fitted to the same prompts before training: all tokens of a "
        "prompt but its first and its last run so many layers, half of the others skipped from where decoding skips "
        "on, half at the top; default as the schedules have it",
    )
    gate_width: int = Field(
        DEFAULT.gate_width,
        ge=0,
        description="width of a gated part added to each bridge, which costs FLOPs; 0 for none",
    )
    adapter_rank: int = Field(
        DEFAULT.adapter_rank,
        ge=0,
        description="rank of a low-rank adapter, of every layer above the first bridge for answers alone, or, where "
        "prompts are bridged, of every layer for these too: it costs no FLOPs, but the memory of these layers' weights "
        "again; 0 for none",
    )
    workers: int = Field(
        1,
        ge=1,
        description="processes that train together on Ray, each on a device of its own and a share of the answers, an "
        "update being of all their tokens; on several machines these must see the same output directory",
    )
    ray_address: str | None = Field(
        None,
        description="of several workers; 'local' starts an embedded cluster; default that of RAY_ADDRESS, else one "
        "that was started on this machine, else as 'local'",
    )

    @model_validator(mode="after")
    def _each_worker_has_its_gpu(self) -> Self:
        if self.workers > 1 and ":" in self.device:
            raise ValueError(
                f"device {self.device!r} names one of several GPUs, and Ray gives each worker its own: cuda"
            )
        return self

    def held_out_of(self, answers: int) -> int:
        """How many of them are judged by."""
        return max(1, round(self.held_out * answers))

    def recipe(self) -> Recipe:
        """How to train."""
        chosen = ("steps", "learning_rate", "gate_width", "adapter_rank", "seed")
        return Recipe(**{name: getattr(self, name) for name in chosen})


@dataclass(frozen=True)
class Training:
    """What a training came to."""

    untrained: list[Quality]  # of each schedule on the held-out answers
    trained: list[tuple[Schedule, Quality]]
    points: list[Point]
    held_out: int  # answers
    lengths: list[tuple[int, int]]  # (prompt tokens, generated tokens) of every answer at temperature 0
    learnt_from: dict[str, Any]

    @property
    def best(self) -> Point:
        """Whose state is written; of step 0 where training has brought nothing."""
        return min(self.points, key=lambda point: point.kl)


def train(config: AdaptModel, schedules: Sequence[Schedule]) -> Training:
    """In this process, together with its peers if it has any. Raises JobError, ModelError, ScheduleError."""
    progress, output = StageProgress(log), Path(config.output)
    settings = settings_of(config, schedules)
    check_settings(output / CHECKPOINT_FILE, settings)
    today = claimed_at(output)
    teacher = config.load_engine(today)
    drawn, provenance = answer_corpus(
        config, teacher, progress, partial(check_drawn, config, teacher, schedules, settings), output / ANSWERS_FILE
    )
    kept = config.held_out_of(len(drawn))
    if kept >= len(drawn):
        raise ScheduleError(
            f"{len(drawn)} answers of two tokens or more leave nothing to learn from beside {kept} to be "
            "judged by: name more prompts, or give a larger input"
        )
    # The last ones: of the same part and seed, calibration draws the first, and has fitted its bridges to them.
    held_out = drawn[-kept:]
    more = (config.answers_per_prompt, progress, output / MORE_ANSWERS_FILE)
    answers = with_more_answers(config, teacher, drawn[:-kept], *more)
    if config.prompt_layers is not None:
        prompts = next(packs([answer.prompt for answer in drawn[:-kept]][:FITTED], len, FITTED_TOKENS))
        cut = prompt_cut(teacher.shape, config.prompt_layers, schedules)
        # One fit for all processes, whose machines may round differently.
        peers = Peers()
        bridge = peers.firsts(fit_prompt_bridge(teacher, prompts, cut, progress) if peers.is_first else None)
        schedules = [replace(schedule, prompt_bridge=bridge) for schedule in schedules]
    kernels = training_kernels_for(teacher.device)
    del teacher  # the memory has room for one of the two
    student = Engine.load(config.model, config.device, "float32", config.threads, kernels, today)
    student.share_prefix(config.template().shared_prefix(student.tokenizer))  # no prompt bridge stands in for it
    trainer = Trainer(student, schedules, answers, held_out, config.recipe(), progress)
    points = []
    for point in trainer.run(output / CHECKPOINT_FILE, settings):
        points.append(point)
        log.info(
            "step %d: %sheld-out KL %.3f, agreement %.3f, %.0f s", point.step,
            "" if point.loss is None else f"loss {point.loss:.3f}, ", point.kl, point.agreement, point.seconds,
        )  # fmt: skip
        if is_early_look(points, config.steps):
            log.info("at this pace held-out KL ends at about %.3f", reachable_kl(points, config.steps))
    learnt_from = {
        **provenance,
        "answers_per_prompt": config.answers_per_prompt,
        "answer_tokens": trainer.tokens,
        "recipe": asdict(config.recipe()),
        "workers": config.workers,
    }
    lengths = [(len(answer.prompt), len(answer.tokens)) for answer in drawn]
    return Training(trainer.untrained, trainer.best(), points, kept, lengths, learnt_from)


def settings_of(config: AdaptModel, schedules: Sequence[Schedule]) -> dict[str, Any]:
    """What decides a training, by option: a model and schedules by what they are, wherever they lie."""
    options = config.model_dump(mode="json", exclude={*DECIDE_NOTHING, "dtype"})
    started = [replace(schedule, provenance={}).to_dict() for schedule in schedules]
    options["schedule"] = hashlib.sha256(json.dumps(started).encode()).hexdigest()[:16]
    options["model"] = model_identity(config.model)[:16]
    if "://" not in config.input:
        options["input"] = os.path.abspath(config.input)
    named = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return named | {"the answers' --dtype": resolve_dtype(config.device, config.dtype)}  # of auto that of the device


def check_drawn(
    config: AdaptModel,
    teacher: Engine,
    schedules: Sequence[Schedule],
    settings: dict[str, Any],
    prompts: Sequence[Sequence[int]],
) -> None:
    """Whether prompts are those of the training that goes on, of whose settings they become one, and whether their
    answers can be trained on in memory, by what is free once the teacher is gone.

    Raises ScheduleError.
    """
    settings["the prompts drawn"] = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    check_settings(Path(config.output) / CHECKPOINT_FILE, settings)  # the input may have grown since
    if Peers().is_first:
        for schedule in schedules:
            warn_of_seen_prompts(config, schedule, len(prompts))
    if config.prompt_layers is not None:
        bridge = counted_prompt_bridge(teacher.shape, prompt_cut(teacher.shape, config.prompt_layers, schedules))
        schedules = [replace(schedule, prompt_bridge=bridge) for schedule in schedules]
    kept, lengths = config.held_out_of(len(prompts)), [len(prompt) for prompt in prompts]
    ours = Peers().share(lengths[:-kept])
    sizes = (config.max_new_tokens, config.answers_per_prompt, config.recipe().tokens_per_step)
    check_memory(
        "training",
        kept_bytes(teacher.shape, schedules, ours, lengths[-kept:], *sizes),
        working_bytes(teacher.shape, schedules, ours, lengths[-kept:], config.max_new_tokens),
        free_bytes(teacher.device) + teacher_bytes(teacher),
        len(prompts),
        model_bytes(teacher.shape, teacher.device) + trained_bytes(schedules, teacher.decoder, config.recipe()),
    )


def warn_of_seen_prompts(config: AdaptModel, schedule: Schedule, drawn: int) -> None:
    """Say that what a schedule has learnt from before may be among what it is judged by here, of so many prompts."""
    left = drawn - config.held_out_of(drawn)
    for how, record in made_from(schedule.provenance, config.part, config.parted_by):
        drawn_as = (record["part"], record["parted_by"], record.get("sampling", {}).get("seed"))
        # A larger draw of a seed only adds to a smaller of the same part.
        if drawn_as != (config.part, config.parted_by, config.seed) or record.get("prompts", left + 1) > left:
            log.warning(
                "the schedule was %s on %s prompts of the %s part by %s: where that was of this input, it is judged by "
                "some of them here, unless more are drawn (--prompts) of the same --part by the same --seed",
                how, record.get("prompts", "other"), record["part"], record["parted_by"],
            )  # fmt: skip


def train_on_cluster(config: AdaptModel, schedules: Sequence[Schedule]) -> Training:
    """`train` in `config.workers` processes of a Ray cluster. Raises what they raise."""
    # One process does without Ray, and without the seconds that it takes to import.
    import ray
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    from pipeline.execution.cluster import connect, cores_each, machines

    connect(config.ray_address)
    cores, gpus = (ray.cluster_resources().get(kind, 0.0) for kind in ("CPU", "GPU"))
    if config.device == "cpu":
        gpus = 0.0
    if 0 < gpus < config.workers or cores < config.workers:
        raise JobError(f"{config.workers} workers are too many for {cores:g} cores and {gpus:g} GPUs: lower workers")
    share = floor(100 * cores_each(machines(float(gpus > 0), config.workers), config.workers)) / 100
    scaling = ScalingConfig(num_workers=config.workers, use_gpu=gpus > 0, resources_per_worker={"CPU": share})
    threads = config.threads or max(1, int(share))
    output = os.path.abspath(config.output)
    paths = {"input": absolute(config.input), "output": output, "model": absolute_model(config.model)}
    passed = {"config": config.model_copy(update={"threads": threads, **paths}), "schedules": schedules}

    # Ray's own records, which all machines must see too; nothing in them is needed afterwards.
    with TemporaryDirectory(prefix=".ray-", dir=output) as scratch:
        trainer = TorchTrainer(
            _work, train_loop_config=passed, scaling_config=scaling, run_config=RunConfig(storage_path=scratch),
            torch_config=TorchConfig(timeout_s=PATIENCE_S),
        )  # fmt: skip
        # Ray would take Ctrl-C for itself, for good, and end the process with no word of a rerun.
        trainer._register_sigint_handler = lambda _: None
        try:
            trained = trainer.fit().return_value
        except TrainingFailedError as error:
            raise reason_of(error) from error
    assert isinstance(trained, Training)
    return trained


def _work(passed: Mapping[str, Any]) -> Training | None:
    """What each of the processes runs; the first one tells."""
    first = Peers().is_first
    if first:
        logs.set_up("text")
    trained = train(passed["config"], passed["schedules"])
    return trained if first else None


def reason_of(error: Exception) -> Exception:
    """Why a worker failed, where that is something the user can change, or a defect; else that a rerun goes on."""
    failures = list(getattr(error, "worker_failures", {}).values())
    for failure in failures:
        if isinstance(failure, JobError | JobStopped | ModelError | ScheduleError | FloatingPointError):
            return failure
    for failure in failures:
        # Whose peers are gone hears so from torch, in a RuntimeError.
        lost = isinstance(failure, RuntimeError | OSError) or type(failure).__module__.startswith("ray.")
        if is_out_of_memory(failure) or not lost:
            return failure  # type: ignore[no-any-return]
    return JobStopped(f"Ray ended the training ({last_line(error)}): start it again to go on from its checkpoint")
