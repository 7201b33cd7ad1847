"""Train calibrated schedules' bridges, with an adapter of the layers above; the model at full depth is the teacher.

python jobs/adapt_model.py --input corpus/ --schedule schedules/1.65x --output adapted/1.65x
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace

from pydantic import Field
from rich.console import Console
from rich.table import Table

import engine
from engine import Engine, ModelShape, Schedule, ScheduleError, decode_flop_speedup
from engine.adaptation.estimate import is_early_look, reachable_kl
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainer import Point, Trainer, is_trainable, prompts_stop
from engine.calibration.quality import Quality
from engine.kernels import Kernels
from engine.target import sample_flop_speedup
from jobs import command_line
from jobs.answers import AnswersConfig, answer_corpus, with_more_answers
from pipeline import logs
from pipeline.evaluation.charts import learning_curve
from pipeline.fit import read_schedule, read_schedules
from pipeline.stage_progress import StageProgress

PROGRAM = "adapt_model.py"
CHECKPOINT_FILE, CURVE_FILE, CARD_FILE = "training.safetensors", "curve.json", "README.md"
FIGURE_FILE = "curve.svg"
DEFAULT = Recipe()

log = logging.getLogger("jobs.adapt_model")


class AdaptModel(AnswersConfig):
    """Train calibrated schedules on the model's own answers to your prompts.

    Their bridges, prompt bridges among them, and a low-rank adapter of the layers above for decode tokens.
    """

    schedule: str = Field(
        description="directory or URL of a calibrated schedule, or of several: these are trained together, with one "
        "adapter that serves all of them"
    )
    target_speedup: float | None = Field(
        None, ge=1, description="train one of several schedules alone, the one that just reaches this"
    )
    output: str = Field(description="local directory for what is trained, like that of schedule; a rerun goes on there")
    prompts: int = Field(1500, ge=20, description="prompts to draw, by the seed; the model answers each of them")
    answers_per_prompt: int = Field(
        1, ge=1, description="answers to learn from for each prompt; those beyond the first are drawn at temperature 1"
    )
    held_out: float = Field(0.1, gt=0, lt=0.5, description="share of them that is judged by, not trained on")
    steps: int = Field(DEFAULT.steps, ge=1, description="updates at most; training ends when judgements stop improving")
    learning_rate: float = Field(DEFAULT.learning_rate, gt=0, description="highest of the warm-up and cosine")
    gate_width: int = Field(
        DEFAULT.gate_width,
        ge=0,
        description="width of a gated part added to each bridge, which costs FLOPs; 0 for none",
    )
    adapter_rank: int = Field(
        DEFAULT.adapter_rank,
        ge=0,
        description="rank of a low-rank adapter of every layer above the first bridge, for answers alone: it costs no "
        "FLOPs, but the memory of these layers' weights again; 0 for none",
    )

    def recipe(self) -> Recipe:
        """How to train."""
        chosen = ("steps", "learning_rate", "gate_width", "adapter_rank", "seed")
        return Recipe(**{name: getattr(self, name) for name in chosen})


def main() -> int:
    logs.set_up("text")
    config = command_line.parse(AdaptModel, PROGRAM)
    return command_line.run(PROGRAM, lambda: adapt(config))


def adapt(config: AdaptModel) -> None:
    """Raises JobError, ModelError, ScheduleError."""
    start, progress = time.monotonic(), StageProgress(log)
    shape = engine.describe(config.model)
    schedules = _read(config, shape)
    prompts_stop(list(schedules.values()))
    output = command_line.make_directory(config.output)
    teacher = config.load_engine()
    drawn = answer_corpus(config, teacher, progress)
    kept = max(1, round(config.held_out * len(drawn.answers)))
    # The last ones: of the same corpus and seed, calibration draws the first, and has fitted its bridges to them.
    held_out = drawn.answers[-kept:]
    train = with_more_answers(config, teacher, drawn.answers[:-kept], config.answers_per_prompt, progress)
    student = Engine.load(config.model, config.device, "float32", config.threads, Kernels())
    student.share_prefix(config.template().shared_prefix(student.tokenizer))  # no prompt bridge stands in for it
    trainer = Trainer(student, list(schedules.values()), train, held_out, config.recipe(), progress)
    untrained = trainer.qualities()
    points = []
    for point in trainer.run(output / CHECKPOINT_FILE):
        points.append(point)
        log.info(
            "step %d: loss %.3f, held-out KL %.3f, agreement %.3f, %.0f s",
            point.step, point.loss, point.kl, point.agreement, point.seconds,
        )  # fmt: skip
        if is_early_look(points, config.steps):
            log.info("at this pace held-out KL ends at about %.3f", reachable_kl(points, config.steps))
    trained = trainer.best()
    learnt_from = {
        **drawn.provenance,
        "answers_per_prompt": config.answers_per_prompt,
        "answer_tokens": trainer.tokens,
        "recipe": asdict(config.recipe()),
    }
    for (name, before), (after, quality) in zip(schedules.items(), trained, strict=True):
        target = before.provenance.get("target_speedup")
        provenance = {
            **before.provenance,
            "name": "adapted" if target is None else f"adapted, {target:g}x",
            "decode_flop_speedup": round(decode_flop_speedup(shape, after, trainer.lengths), 4),
            "sample_flop_speedup": round(sample_flop_speedup(shape, after, trainer.lengths), 4),
            "held_out": {"answers": kept, **quality.figures()},
            "adapted_on": learnt_from,
        }
        replace(after, provenance=provenance).write(output / name)
    (output / CURVE_FILE).write_text(json.dumps([asdict(point) for point in points], indent=1))
    (output / FIGURE_FILE).write_text(learning_curve(points))
    changes = [(before, after) for before, (_, after) in zip(untrained, trained, strict=True)]
    (output / CARD_FILE).write_text(_card(config, dict(zip(schedules, changes, strict=True))))
    Console().print(_table(points))
    print(f"{time.monotonic() - start:.0f} s; run it with --schedule {output}")


def _read(config: AdaptModel, shape: ModelShape) -> dict[str, Schedule]:
    """What to train, by the directory below the output to write it to; a schedule alone goes to the output itself."""
    if config.target_speedup is None:
        schedules = read_schedules(config.schedule, config.storage)
    else:
        schedules = {"": read_schedule(config.schedule, config.target_speedup, config.storage)}
    for schedule in schedules.values():
        schedule.check_fits(shape)
    trained = {name: schedule for name, schedule in schedules.items() if is_trainable(schedule)}
    if not trained:
        raise ScheduleError(f"{config.schedule!r} has no bridges to train: make one with calibrate_schedule.py")
    for name in schedules.keys() - trained.keys():
        log.warning("%s has no bridges to train and is left out", name)
    return trained


def _table(points: list[Point]) -> Table:
    table = Table(title="on held-out answers, teacher-forced", title_justify="left")
    for name in ("step", "training loss", "KL", "agreement", "seconds"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            str(point.step), f"{point.loss:.3f}", f"{point.kl:.3f}", f"{point.agreement:.3f}", f"{point.seconds:.0f}"
        )
    return table


def _card(config: AdaptModel, changes: Mapping[str, tuple[Quality, Quality]]) -> str:
    """A model card: what this is, and what training changed of each schedule."""
    what = f"bridges and an adapter of rank {config.adapter_rank}" if config.adapter_rank else "bridges"
    rows = "\n".join(
        f"| {f'{name}, ' if name else ''}{when} | {quality.mean_kl:.3f} | {quality.agreement:.3f} |"
        for name, before_and_after in changes.items()
        for when, quality in zip(("before", "after"), before_and_after, strict=True)
    )
    alone = "" in changes
    return f"""---
base_model: {config.model}
library_name: skipdecode
---
{"A SkipDecode schedule" if alone else "SkipDecode schedules"} trained on {config.input}, from {config.schedule}: \
{what}. The model's own weights are unchanged.
Run {"it" if alone else "one of them"} with `python jobs/summarize_corpus.py --model {config.model} --schedule \
<this directory>{"" if alone else " --target-speedup <x>"} ...`.

| on held-out answers of full depth, teacher-forced | KL, nats per token | agreement |
|---|---|---|
{rows}

![Learning curve]({FIGURE_FILE})

`{CURVE_FILE}` holds the learning curve, `{CHECKPOINT_FILE}` the state to go on from.
"""


if __name__ == "__main__":
    sys.exit(main())
