"""Train calibrated schedules' bridges, with an adapter of the layers above; the model at full depth is the teacher.

python jobs/adapt_model.py --input corpus/ --schedule schedules/1.65x --output adapted/1.65x
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from huggingface_hub import ModelCardData
from rich.console import Console
from rich.table import Table

import engine
from engine import ModelShape, Schedule, ScheduleError, decode_flop_speedup
from engine.adaptation.trainable import check_parts
from engine.adaptation.trainer import is_trainable
from engine.calibration.prompts import check_prompt_layers
from engine.forward.target import sample_flop_speedup
from jobs import command_line
from jobs.adaptation import CHECKPOINT_FILE, AdaptModel, Training, train, train_on_cluster
from jobs.answers import ANSWERS_FILE
from pipeline.dataset.card import inline
from pipeline.evaluation.charts import learning_curve
from pipeline.evaluation.contender import ending
from pipeline.preparing.fit import check_no_others, read_schedule, read_schedules, warn_of_another_model
from pipeline.storage.ownership import claim_directory

PROGRAM = "adapt_model.py"
CURVE_FILE, FIGURE_FILE, CARD_FILE = "curve.json", "curve.svg", "README.md"

log = logging.getLogger("jobs.adapt_model")


def adapt(config: AdaptModel) -> None:
    """Raises JobError, JobStopped, ModelError, ScheduleError."""
    start = time.monotonic()
    output = claim_directory(config.output, PROGRAM, [config.input], filter(None, [config.schedule]))
    shape = engine.describe(config.model)
    schedules = _read(config, shape)
    check_no_others(output, schedules)
    for schedule in schedules.values():
        warn_of_another_model(schedule, config.model, engine.model_identity(config.model))
    done = (train if config.workers == 1 else train_on_cluster)(config, list(schedules.values()))
    shared, made = done.learnt_from["shared_prefix_tokens"], dict[str, Schedule]()
    for (name, before), (after, quality) in zip(schedules.items(), done.trained, strict=True):
        if done.best.step == 0:  # what training has added costs, and does nothing
            after = replace(before, prompt_bridge=after.prompt_bridge)
        provenance = {
            **before.provenance,
            **({"name": _name(before.provenance)} if done.best.step else {}),
            "decode_flop_speedup": round(decode_flop_speedup(shape, after, done.lengths), 4),
            "sample_flop_speedup": round(sample_flop_speedup(shape, after, done.lengths, shared), 4),
            "held_out": {"answers": done.held_out, **quality.figures()},
            "adapted_on": done.learnt_from,
        }
        if (earlier := before.provenance.get("adapted_on")) is not None:  # what it has learnt from then it still knows
            provenance["adapted_before"] = [*before.provenance.get("adapted_before", []), earlier]
        made[name] = replace(after, provenance=provenance)
        made[name].write(output / name)
    (output / CURVE_FILE).write_text(json.dumps([point._asdict() for point in done.points], indent=1))
    (output / FIGURE_FILE).write_text(learning_curve(done.points), encoding="utf-8")
    (output / CARD_FILE).write_text(_card(config, made, done), encoding="utf-8", errors="backslashreplace")
    Console().print(_table(done))
    log.info("written: the state of step %d, of held-out KL %.3f", done.best.step, done.best.kl)
    if done.best.step == 0:
        log.warning("training has brought nothing: what is written is as it was before")
    print(
        f"{time.monotonic() - start:.0f} s; run it with --schedule {output}, judge it with evaluate_schedule.py "
        f"--schedules {output}"
    )


def _read(config: AdaptModel, shape: ModelShape) -> dict[str, Schedule]:
    """What to train, by the directory below the output to write it to; a schedule alone goes to the output itself."""
    if config.schedule is None:
        if config.prompt_layers is None:
            raise ScheduleError("nothing would be skipped: name a --schedule, or the --prompt-layers that prompts run")
        if config.target_speedup is not None:
            raise ScheduleError("--target-speedup chooses among schedules: name them by --schedule, or leave it out")
        schedules = {"": Schedule.full_depth(shape.layers)}
    elif config.target_speedup is None:
        schedules = read_schedules(config.schedule, config)
    else:
        schedules = {"": read_schedule(config.schedule, config.target_speedup, config)}
    for name, schedule in schedules.items():
        schedule.check_fits(shape)
        if config.prompt_layers is not None and schedule.prompt_bridge is not None:
            raise ScheduleError(f"{name or config.schedule} has a prompt bridge already: leave out --prompt-layers")
        if schedule.adapter is not None and config.prompt_layers is not None and not schedule.adapter.changes_prompts:
            raise ScheduleError(
                f"{name or config.schedule} has an adapter of decode tokens alone, that learns no prompts: leave out "
                "--prompt-layers, or begin with the schedule that it was trained from"
            )
        if schedule.adapter is not None and schedule.adapter.rank != config.adapter_rank:
            log.warning(
                "%s goes on with the adapter that it has, of rank %d: --adapter-rank is for those without one",
                name or config.schedule, schedule.adapter.rank,
            )  # fmt: skip
    if config.prompt_layers is not None:
        check_prompt_layers(config.prompt_layers, shape)
    trained = {name: each for name, each in schedules.items() if config.prompt_layers or is_trainable(each)}
    if not trained:
        raise ScheduleError(f"{config.schedule!r} skips nothing: there is nothing to learn")
    if config.prompt_layers is None:
        check_parts([*trained.values()], config.adapter_rank)
    if config.gate_width and not any(each.bridges for each in trained.values()):
        log.warning("--gate-width is for bridges that answers pass, and there are none")
    elif config.gate_width and any("gate" in it.tensors for each in trained.values() for it in each.bridges.values()):
        log.warning("bridges that are gated go on as they are: --gate-width is for those that are not")
    for name in schedules.keys() - trained.keys():
        log.warning("%s skips nothing: there is nothing to learn, and it is left out", name)
    return trained


def _name(provenance: Mapping[str, Any]) -> str:
    """Of an adapted schedule: as before, but that it is adapted."""
    target = provenance.get("target_speedup")
    before = str(provenance.get("name", "")).removesuffix(ending(target)).removesuffix("adapted").removesuffix(", ")
    return (f"{before}, adapted" if before else "adapted") + ending(target)


def _table(done: Training) -> Table:
    table = Table(title=f"on {done.held_out} held-out answers, teacher-forced", title_justify="left")
    for name in ("step", "training loss", "KL", "agreement", "seconds"):
        table.add_column(name, justify="right")
    for step, loss, *figures, seconds in done.points:
        trained = "-" if loss is None else f"{loss:.3f}"
        table.add_row(str(step), trained, *(f"{figure:.3f}" for figure in figures), f"{seconds:.0f}")
    return table


def _card(config: AdaptModel, made: Mapping[str, Schedule], done: Training) -> str:
    """A model card: what this is, what it saves, and what training changed of each schedule."""
    rank = max((schedule.adapter.rank for schedule in made.values() if schedule.adapter), default=0)
    bridges = "bridges" if any(each.bridges or each.prompt_bridge for each in made.values()) else ""
    what = " and ".join(filter(None, [bridges, f"an adapter of rank {rank}" if rank else ""]))
    rows = "\n".join(
        f"| {f'{name}, ' if name else ''}{when} | {quality.mean_kl:.3f} | {quality.agreement:.3f} |"
        for name, before, (_, after) in zip(made, done.untrained, done.trained, strict=True)
        for when, quality in (("before", before), ("after", after))
    )
    saved = "\n".join(
        f"{f'{name}: ' if name else ''}{schedule.provenance['sample_flop_speedup']:.2f}x fewer FLOPs than full depth "
        f"for whole samples of the lengths it has learnt from, {schedule.provenance['decode_flop_speedup']:.2f}x in "
        "decoding.\n"
        for name, schedule in made.items()
    )
    if done.best.step == 0:
        saved += "\nTraining has brought nothing: what is written is as it was before.\n"
    alone = "" in made
    return f"""---
{ModelCardData(base_model=config.model, library_name="skipdecode").to_yaml()}
---
{"A SkipDecode schedule" if alone else "SkipDecode schedules"} trained on {inline(config.input)}, from \
{inline(config.schedule) if config.schedule else "full depth"}: {what}. The model's own weights are unchanged.
Run {"it" if alone else "one of them"} with `python jobs/summarize_corpus.py --model {config.model} --schedule \
<this directory>{"" if alone else " --target-speedup <x>"} ...`, with the prompt that it has learnt from, or one much \
like it: {inline(config.prompt)}.

{saved}
| on {done.held_out} held-out answers of full depth, teacher-forced | KL, nats per token | agreement |
|---|---|---|
{rows}

![Learning curve]({FIGURE_FILE})

`{CURVE_FILE}` holds the learning curve, `{CHECKPOINT_FILE}` the state to go on from, `{ANSWERS_FILE}` what was learnt
from.
"""


if __name__ == "__main__":
    sys.exit(command_line.start(AdaptModel, PROGRAM, adapt))
