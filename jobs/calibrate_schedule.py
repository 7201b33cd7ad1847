"""Make schedules for one's own prompts: bridges fitted on the model's answers, judged on held-out ones.

python jobs/calibrate_schedule.py --input corpus/ --output schedules/ --target-speedups 1.25 1.45 1.65
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

import engine
from engine import Engine
from engine.calibration.calibrate import Calibrated, Calibration
from engine.calibration.collect import answer_prompts
from jobs import command_line
from jobs.corpus_split import Part, part_of
from pipeline.config import AnswerConfig
from pipeline.errors import JobError
from pipeline.fit import longest_prompt
from pipeline.rows import TOKENS
from pipeline.sample_prompts import sample_prompts

PROGRAM = "calibrate_schedule.py"
SAY_EVERY_S = 10

log = logging.getLogger("jobs.calibrate_schedule")


class CalibrateSchedule(AnswerConfig):
    """Fit and choose bridged schedules on a sample of your prompts; writes a directory for each target speed-up."""

    prompt: str = Field(
        "Summarize the following text in one short sentence.\n\n{text}",
        description="user text, with {text} and {column} fields; {{ and }} are plain braces",
    )
    max_new_tokens: int = Field(64, ge=1, description="longest answer")
    input: str = Field(description="Parquet file, directory or glob: a local path or any fsspec URL such as s3://")
    output: str = Field(description="local directory to write the schedules to, one below it for each target")
    part: Part | None = Field(
        None, description="use only rows whose id hashes into this part of the corpus: calibrate, train or test"
    )
    prompts: int = Field(500, ge=1, description="prompts to draw, by the seed; the model answers each of them")
    target_speedups: list[float] = Field([1.25, 1.45, 1.65], min_length=1, description="decode FLOP speed-ups")
    threads: int | None = Field(None, ge=1, description="CPU threads; default torch's own choice")


class Progress:
    """Says every few seconds how far a stage is, how fast it goes and how long it still takes."""

    def __init__(self) -> None:
        self._stage, self._start, self._said = "", 0.0, 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._start, self._said = stage, now, now
            log.info("%s: %d", stage, total)
        elif now - self._said >= SAY_EVERY_S or done == total:
            rate = done / max(now - self._start, 1e-9)
            log.info("%s: %d of %d, %.1f/s, %.0f s left", stage, done, total, rate, (total - done) / rate)
            self._said = now


def main() -> int:
    command_line.log_to_stderr()
    config = command_line.parse(CalibrateSchedule, PROGRAM)
    return command_line.run(PROGRAM, lambda: calibrate(config))


def calibrate(config: CalibrateSchedule) -> None:
    start, progress = time.monotonic(), Progress()
    output = Path(config.output)
    _check_output(output)
    model = Engine.load(config.model, device=config.device, dtype=config.dtype, threads=config.threads)
    belongs = None if config.part is None else lambda row_id: part_of(row_id) == config.part
    longest = longest_prompt(config, model.shape)
    rows = sample_prompts(config, config.input, model.tokenizer, longest, config.prompts, belongs=belongs)
    prompts: list[list[int]] = rows[TOKENS].to_pylist()
    batch_size = config.batch_size
    if batch_size == "auto":
        batch_size = model.fitting_batch_size(max(map(len, prompts)), config.sampling())
    answers = answer_prompts(model, prompts, config.sampling(), batch_size, progress)
    calibration = Calibration(model, answers, sorted(set(config.target_speedups)), progress)
    made = {
        "model": [config.model, engine.model_identity(config.model), config.dtype],
        "prompts": len(prompts),
        "prompts_digest": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "part": config.part,
        "sampling": config.sampling().to_dict(),
        "version": engine.__version__,
    }
    table = _table()
    for found in calibration.run():
        directory = output / f"{found.target:g}x"
        found.with_provenance(calibrated_on=made).write(directory)
        table.add_row(*_row(found), str(directory))
    Console().print(table)
    print(f"{time.monotonic() - start:.0f} s; run one with --schedule {output}/<target>x, or --schedule {output} "
          "--target-speedup <target>")  # fmt: skip


def _check_output(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"output {str(output)!r} cannot be written: {error}") from error


def _table() -> Table:
    table = Table(title="on held-out answers, teacher-forced", title_justify="left")
    for name in ("target", "decode FLOPs", "whole sample", "skipped from step", "KL", "agreement", "directory"):
        table.add_column(name)
    return table


def _row(found: Calibrated) -> list[str]:
    figures: dict[str, Any] = dict(found.schedule.provenance)
    held_out = figures["held_out"]

    def shown(name: str) -> str:
        low, high = held_out[f"{name}_interval"]
        return f"{held_out[name]:.3f} [{low:.3f}, {high:.3f}]"

    return [
        f"{found.target:g}x",
        f"{figures['decode_flop_speedup']:.3f}x",
        f"{figures['sample_flop_speedup']:.3f}x",
        ", ".join(f"{plateau.skipped // 2} from {plateau.first_step}" for plateau in found.schedule.plateaus),
        shown("kl"),
        shown("agreement"),
    ]


if __name__ == "__main__":
    sys.exit(main())
