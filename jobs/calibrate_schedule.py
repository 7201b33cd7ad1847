"""Make schedules for one's own prompts: bridges fitted on the model's answers, judged on held-out ones.

python jobs/calibrate_schedule.py --input corpus/ --output schedules/ --target-speedups 1.25 1.45 1.65
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator
from rich.console import Console
from rich.table import Table

from engine import Engine, Schedule, ScheduleError, describe
from engine.calibration.calibrate import Calibration, check_targets, foreseen_depths
from engine.calibration.memory import kept_bytes, kept_of, working_bytes
from engine.calibration.prompts import check_prompt_layers
from engine.memory import LEAST_ANSWERS, check_memory, free_bytes
from engine.schedules.schedule_file import SCHEDULE_FILE
from jobs import command_line
from jobs.answers import ANSWERS_FILE, AnswersConfig, TargetSpeedup, answer_corpus
from pipeline.errors import JobError
from pipeline.inputs.sample_prompts import Part
from pipeline.monitoring.stage_progress import StageProgress
from pipeline.preparing.fit import check_no_others
from pipeline.reporting.schedule_maps import schedule_maps
from pipeline.storage.ownership import claim_directory, claimed_at
from pipeline.storage.settings import Place

PROGRAM = "calibrate_schedule.py"
MAPS_FILE = "schedules.svg"
COLUMNS = (
    "target", "decode FLOPs", "whole sample", "skipped from step", "on prompts", "head", "KL", "agreement",
)  # fmt: skip

log = logging.getLogger("jobs.calibrate_schedule")


class CalibrateSchedule(AnswersConfig):
    """Fit and choose bridged schedules on a sample of your prompts; writes a directory for each, and draws them."""

    part: Part = "calibrate"
    output: Place = Field(description="local directory to write the schedules to, one below it for each target")
    prompts: int = Field(500, ge=LEAST_ANSWERS, description="prompts to draw, by the seed")
    target_speedups: list[TargetSpeedup] = Field([1.25, 1.45, 1.65], min_length=1, description="decode FLOP speed-ups")
    target_sample_speedups: list[TargetSpeedup] = Field(
        [],
        description="FLOP speed-ups of the whole sample, prompts included: one schedule for each, which takes the best "
        "of target_speedups in decoding and as many layers on prompts as reach it; a minute or two for each pair",
    )
    prompt_layers: int | None = Field(
        None,
        ge=1,
        description="all tokens of a prompt but its first and its last run so many layers, half of the others skipped "
        "from where decoding skips on, half at the top; linear maps give keys and values; default all layers",
    )
    whole_head: bool = Field(
        False,
        description="compute all of the vocabulary's logits exactly; by default only the likeliest, where that costs "
        "less quality than skipping more layers",
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if self.target_sample_speedups and self.prompt_layers is not None:
            raise ValueError("target_sample_speedups choose the layers on prompts: leave out prompt_layers")
        named = Counter(map(_name, set(self.target_sample_speedups or self.target_speedups)))
        if (twice := named.most_common(1)[0])[1] > 1:
            raise ValueError(f"two targets have the directory {twice[0]!r}: leave one of them out")
        return self


def calibrate(config: CalibrateSchedule) -> None:
    """Raises JobError, ModelError, ScheduleError."""
    start, progress = time.monotonic(), StageProgress(log)
    output = claim_directory(config.output, PROGRAM, [config.input])
    targets, sample_targets = sorted(set(config.target_speedups)), sorted(set(config.target_sample_speedups))
    check_no_others(output, map(_name, sample_targets or targets))
    shape = describe(config.model)
    if config.prompt_layers is not None:
        check_prompt_layers(config.prompt_layers, shape)
    model = config.load_engine(claimed_at(output))
    drawn, made = answer_corpus(config, model, progress, partial(check_sample, config, model), output / ANSWERS_FILE)
    warn_of_others(output, map(_name, sample_targets or targets), made)
    chosen = (config.prompt_layers, config.whole_head, sample_targets)
    calibration = Calibration(model, drawn, targets, progress, *chosen)
    table, maps = Table(*COLUMNS, title_justify="left"), []
    try:
        for target, found in zip(sample_targets or targets, calibration.run(), strict=True):
            name = _name(target)
            replace(found, provenance={**found.provenance, "calibrated_on": made}).write(output / name)
            table.title = f"on {found.provenance['held_out']['answers']} held-out answers, teacher-forced"
            table.add_row(name, *_row(found))
            maps.append((name, found))
    finally:  # a later target may be out of reach
        if maps:
            (output / MAPS_FILE).write_text(schedule_maps(maps, config.max_new_tokens), encoding="utf-8")
            # What is no terminal has no width: in rich's 80 columns headers would be cut.
            Console(width=None if sys.stdout.isatty() else 160).print(table)
    meant = "target" if config.prompt_layers is None else "speed-up of the whole sample"
    print(f"{time.monotonic() - start:.0f} s; run one with --schedule {output}/<target>x, or --schedule {output} "
          f"--target-speedup <{meant}>; judge them with evaluate_schedule.py --schedules {output}, train one with "
          f"adapt_model.py --schedule {output}/<target>x")  # fmt: skip


def warn_of_others(output: Path, names: Iterable[str], made: Mapping[str, Any]) -> None:
    """Say which schedules of an earlier call, from other answers than these, will be written over."""
    for file in filter(Path.exists, (output / name / SCHEDULE_FILE for name in names)):
        with suppress(ScheduleError):  # nothing is lost with a damaged one
            before = Schedule.read(file).provenance.get("calibrated_on")
            if before and before != json.loads(json.dumps(made)):
                log.warning(
                    "the schedule in %s, calibrated on other answers, to %s prompts, will be written over",
                    file.parent, before.get("prompts"),
                )  # fmt: skip


def check_sample(config: CalibrateSchedule, model: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Whether schedules can be made from the answers to some prompts, and in the memory that is free beside the model.

    Raises JobError, ScheduleError.
    """
    if len(prompts) < LEAST_ANSWERS:
        drawn_from = "all" if config.part == "all" else f"the {config.part} part"
        raise JobError(
            f"calibration needs {LEAST_ANSWERS} prompts, and {drawn_from} of {config.input!r} makes {len(prompts)}: "
            "give a larger input, or another part (--part)"
        )
    shape, answer_tokens = model.shape, config.max_new_tokens
    check_targets(config.target_speedups, shape, prompts, answer_tokens, config.whole_head)
    sizes = [len(prompt) for prompt in prompts], answer_tokens, model.item_sizes
    depths = foreseen_depths(config.target_speedups, shape, sizes[0], answer_tokens, config.whole_head)
    bridged = shape.layers - config.prompt_layers if config.prompt_layers else 0
    if config.target_sample_speedups:
        bridged = shape.layers // 2  # as far as one can tell yet
    kept = kept_bytes(shape, *sizes, prompts_change=bool(config.target_sample_speedups))
    working = working_bytes(shape, *sizes, depths, bridged, config.whole_head)
    free, grows_with = free_bytes(model.device), kept_of(sizes[0])
    check_memory("calibrating", kept, working, free, len(prompts), kept_of=grows_with)


def _name(target: float) -> str:
    """Of its directory."""
    return f"{target:g}x"


def _row(found: Schedule) -> list[str]:
    figures = found.provenance
    held_out = figures["held_out"]

    def shown(name: str) -> str:
        low, high = held_out[f"{name}_interval"]
        return f"{held_out[name]:.3f} [{low:.3f}, {high:.3f}]"

    return [
        f"{figures['decode_flop_speedup']:.3f}x",
        f"{figures['sample_flop_speedup']:.3f}x",
        ", ".join(f"{plateau.skipped // 2} from {plateau.first_step}" for plateau in found.plateaus),
        f"{bridge.layers if (bridge := found.prompt_bridge) else found.layers} layers",
        f"rank {preview.rank}" if (preview := found.head_preview) else "whole",
        shown("kl"),
        shown("agreement"),
    ]


if __name__ == "__main__":
    sys.exit(command_line.start(CalibrateSchedule, PROGRAM, calibrate))
