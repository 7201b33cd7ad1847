"""Judge schedules and rivals against full depth on held-out prompts, and write a report. Rerun to resume or extend.

python jobs/evaluate_schedule.py --input corpus.parquet --schedules calibrated/ --rivals all --output out/quality
"""

import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Self

import pyarrow.parquet as pq
from pydantic import Field, field_validator, model_validator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine import Engine, ModelShape, Schedule, __version__, describe, model_identity, resolve_dtype
from engine.bootstrap import Bootstrap, Estimate
from engine.calibration.prompts import check_prompt_layers
from engine.checkpoints.tokenizer import Tokenizer
from engine.schedules.schedule_file import SCHEDULE_FILE
from jobs import command_line
from jobs.answers import TargetSpeedup
from jobs.prompts import SUMMARIZE
from pipeline.config import PromptText
from pipeline.errors import JobError
from pipeline.evaluation.bridged_rivals import bridged_rivals, whole_sample_rivals, with_shorter_prompts
from pipeline.evaluation.contender import Contender, ending
from pipeline.evaluation.figures import Figures, combined, figures, read_outputs
from pipeline.evaluation.report import render
from pipeline.evaluation.rivals import RIVALS, RivalCalibration, SolvedRivals
from pipeline.evaluation.study import Prompt, Study
from pipeline.inputs.sample_prompts import CorpusConfig, Part, sample_prompts
from pipeline.inputs.work import input_columns
from pipeline.preparing.fit import longest_prompt, made_from, read_schedules, warn_of_another_model
from pipeline.reporting.page import REPORT_FILE
from pipeline.rows.rows import TOKENS
from pipeline.storage.ownership import claim_directory, claimed_at
from pipeline.storage.settings import LocalPlace, Place, StorageConfig
from pipeline.storage.storage import Storage
from pipeline.values.column_types import holds_text
from pipeline.values.show import names, texts

log = logging.getLogger("jobs.evaluate_schedule")

PROGRAM = "evaluate_schedule.py"
FIGURES_FILE, OUTPUTS_FILE, WORK_FOLDER = "figures.json", "outputs.parquet", "work"
REFERENCE = "reference"
MAY_CHANGE = {"schedules", "rivals", "target_speedups", "prompt_layers", "rows", "threads"}  # options, in a rerun
RIVALS_FOLDER = "rivals"  # in the work folder as they were solved, beside it as schedules


class EvaluateSchedule(CorpusConfig):
    """Judge schedules and rivals against full depth: quality with intervals, FLOPs and speed. Rerun to resume."""

    output: LocalPlace = Field(description="directory to write to; outputs found there are not computed again")
    schedules: list[Place] = Field(
        [],
        description="schedule files, their directories, or directories of such directories (as calibrating writes): "
        "paths or URLs",
    )
    rivals: list[str] = Field([], description=f"any of {', '.join(RIVALS)}; or all")
    target_speedups: list[TargetSpeedup] = Field(
        [1.25, 1.45, 1.65], min_length=1, description="decode FLOP speed-ups to solve rivals for"
    )

    reference_column: str | None = Field(
        None,
        description="string column of reference outputs; '' judges against full depth's outputs alone; default "
        f"{REFERENCE} if the input has one of text",
    )
    prompt: PromptText = SUMMARIZE
    max_new_tokens: int = Field(64, ge=2, description="longest generation")
    batch_size: int = Field(32, ge=1, description="prompts that decode together, and are saved together")

    part: Part = "test"
    rows: int = Field(
        500, ge=2, description="prompts to judge on; raising it later adds to those there, whose full batches are kept"
    )
    calibration_rows: int = Field(32, ge=2, description="prompts of the calibrate part that rivals are solved on")
    bridged_rivals: bool = Field(False, description="also judge rivals whose skipped blocks are given bridges")
    target_sample_speedup: TargetSpeedup | None = Field(
        None,
        description="also judge rivals that reach this FLOP speed-up of the whole sample: those with bridges, at each "
        "of target_speedups in decoding and as many layers on prompts as reach it, decoding through all layers with "
        "fewer on prompts, and a pruned model, which has lost the same layers for all tokens",
    )
    bridge_rows: int = Field(256, ge=20, description="prompts of the calibrate part that these bridges are fitted on")
    prompt_layers: list[int] = Field(
        [],
        description="also judge full depth, and the schedules that run all layers on prompts, with prompts that run so "
        "many, by bridges fitted on bridge_rows prompts, and draw both savings as a heat map",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="which rows are drawn, of the random streams and of the bootstrap")
    threads: int | None = Field(None, ge=1, description="CPU threads; default torch's own choice")

    @field_validator("rivals", "target_speedups")
    @classmethod
    def _each_once(cls, named: list[Any]) -> list[Any]:
        return list(dict.fromkeys(named))

    @model_validator(mode="after")
    def _has_contenders(self) -> Self:
        unknown = sorted(set(self.rivals) - {*RIVALS, "all"})
        if unknown:
            raise ValueError(f"rival {unknown[0]!r} is not known: known are {', '.join(RIVALS)}, all")
        if not (self.schedules or self.rivals or self.needs_bridges):
            raise ValueError("name something to judge: schedules, rivals, or both")
        return self

    @property
    def needs_bridges(self) -> bool:
        return self.bridged_rivals or self.target_sample_speedup is not None or bool(self.prompt_layers)


def evaluate(config: EvaluateSchedule) -> None:
    """Raises JobError, ModelError, ScheduleError; before the model is loaded, but for rivals that cannot be solved."""
    today = claimed_at(claim_directory(config.output, PROGRAM, [config.input]))
    shape = describe(config.model)
    for layers in config.prompt_layers:
        check_prompt_layers(layers, shape)
    named = read_contenders(config.schedules, shape, config)
    config = with_reference_column(config)
    warn_of_seen_rows(config, named)
    tokenizer = Tokenizer.load(config.model, today)
    prompts = read_prompts(config, config.part, config.rows, tokenizer, shape)
    needed = max(config.bridge_rows * config.needs_bridges, config.calibration_rows * bool(config.rivals))
    held_back = read_prompts(config, "calibrate", needed, tokenizer, shape) if needed else []
    engine = Engine.load(config.model, config.device, config.dtype, config.threads, now=today)
    sampling, identity = config.sampling(), model_identity(config.model)
    for contender in named:
        if isinstance(contender.method, Schedule):
            warn_of_another_model(contender.method, config.model, identity)
    if (where := f"{engine.device.type} {resolve_dtype(config.device, config.dtype)}") != "cpu float32":
        identity += f" {where}"  # tokens of another precision are another study's
    engine.share_prefix(config.template().shared_prefix(engine.tokenizer))  # as jobs do
    contenders = [Contender.full_depth(shape.layers), *named]
    fitted_to = [prompt.tokens for prompt in held_back[: config.bridge_rows]]
    if config.prompt_layers:
        contenders += with_shorter_prompts(contenders, config.prompt_layers, engine, fitted_to)
    if config.bridged_rivals or config.target_sample_speedup is not None:
        log.info("fitting the rivals' bridges on %d calibration prompts", len(fitted_to))
        calibration = RivalCalibration.measure(engine, sampling, fitted_to, config.batch_size)
        if config.bridged_rivals:
            contenders += bridged_rivals(config.target_speedups, calibration)
        if config.target_sample_speedup is not None:
            contenders += whole_sample_rivals(config.target_sample_speedup, config.target_speedups, calibration)
    if config.rivals:
        tokens = [prompt.tokens for prompt in held_back[: config.calibration_rows]]
        wanted = list(RIVALS) if "all" in config.rivals else config.rivals
        log.info("solving rivals on %d calibration prompts", len(tokens))
        solved = SolvedRivals(config.output / WORK_FOLDER / RIVALS_FOLDER, identity, sampling, tokens)
        measure = partial(RivalCalibration.measure, engine, sampling, tokens, config.batch_size)
        for rival in solved.solve(wanted, config.target_speedups, measure):
            log.info("%s: %s", rival.label, rival.note or "solved")
            contenders.append(rival)
    contenders = told_apart(contenders)
    write_rivals(config, contenders)
    # What a version counts, and answers behind a prefix that is shared or not, are not another's.
    decided_by = f"{identity} {__version__} prefix {engine.shared_tokens}"
    study = Study(config.output / WORK_FOLDER, decided_by, sampling, config.batch_size, prompts)
    study.run(engine, contenders)
    write_results(config, study, contenders)


def write_rivals(config: EvaluateSchedule, contenders: Sequence[Contender]) -> None:
    """A directory for each rival that is a schedule, for jobs to run, and to adapt with the same budget as others."""
    model = [config.model, model_identity(config.model), resolve_dtype(config.device, config.dtype)]
    fitted_on = {"model": model, "part": "calibrate", "parted_by": config.parted_by}
    for each in contenders:
        if each.is_rival and isinstance(each.method, Schedule):
            name = each.name + ending(each.target)  # what prompts run is said of whatever is read
            provenance: dict[str, Any] = {"name": name, "target_speedup": each.target, "note": each.note}
            if each.method.all_bridges or each.method.prompt_bridge or each.method.head_preview:
                provenance["calibrated_on"] = fitted_on
            replace(each.method, provenance=provenance).write(config.output / RIVALS_FOLDER / each.file_name)


def write_results(config: EvaluateSchedule, study: Study, contenders: Sequence[Contender]) -> None:
    """outputs.parquet, figures.json and report.html of a finished study; prints the table."""
    log.info("comparing outputs, and drawing the report")
    outputs = read_outputs(study, contenders)
    bootstrap = Bootstrap(len(study.prompts), config.seed)
    found = [figures(each, bootstrap) for each in outputs]
    pq.write_table(combined(outputs), config.output / OUTPUTS_FILE)
    described = config.model_dump(mode="json", exclude_none=True)
    results = {"config": described, "contenders": [asdict(each) for each in found]}
    warn_of_another_report(config.output / FIGURES_FILE, described, [each.label for each in found])
    (config.output / FIGURES_FILE).write_text(json.dumps(results, indent=1))
    (config.output / REPORT_FILE).write_bytes(render(outputs, found, described).encode(errors="backslashreplace"))
    # What is no terminal has no width: in rich's 80 columns names that differ at their end would look the same.
    Console(width=None if sys.stdout.isatty() else 160).print(_table(found))
    for file in (OUTPUTS_FILE, FIGURES_FILE, REPORT_FILE):
        print(f"{file.split('.')[0]}: {config.output / file}")


def with_reference_column(config: EvaluateSchedule) -> EvaluateSchedule:
    """The same with a column that the input has, or with "". Raises JobError."""
    if config.reference_column == "":
        return config
    columns = input_columns(Storage(config.input, config, config.s3_anonymous_input))
    if config.reference_column is None:
        is_text = REFERENCE in columns and holds_text(columns[REFERENCE])  # what else is called so is none
        return config.model_copy(update={"reference_column": REFERENCE if is_text else ""})
    without = "or judge against full depth's outputs alone (--reference-column '')"
    if config.reference_column not in columns:
        raise JobError(
            f"the input has no column {config.reference_column!r}: name one of {', '.join(sorted(columns))}, {without}"
        )
    if not holds_text(type_ := columns[config.reference_column]):
        raise JobError(
            f"column {config.reference_column!r} is {type_}, not string: name a column of reference outputs, {without}"
        )
    return config


def read_contenders(paths: Sequence[str], shape: ModelShape, settings: StorageConfig | None = None) -> list[Contender]:
    """Schedules of files and directories, local or by URL, each once. Raises JobError, ScheduleError."""
    found: dict[str, Contender] = {}  # by where they lie
    for path in paths:
        for folder, schedule in read_schedules(path, settings).items():
            schedule.check_fits(shape)
            target = schedule.provenance.get("target_speedup")
            target = None if target is None else float(target)
            place = f"{path.rstrip('/')}/{folder}" if folder else path.rstrip("/")
            name = str(schedule.provenance.get("name") or PurePosixPath(place).name.removesuffix(".json"))
            name = name.removesuffix(ending(target))
            if (whole := schedule.provenance.get("target_sample_speedup")) is not None:
                name, target = f"{name}, {whole:g}x of whole samples", None
            found.setdefault(place.removesuffix(f"/{SCHEDULE_FILE}"), Contender(name, target, schedule))
    often = Counter(contender.label for contender in found.values())
    # Two calibrations of one target have one name: then where they lie is part of it.
    return [
        contender if often[contender.label] == 1 else replace(contender, name=f"{contender.name} ({path})")
        for path, contender in found.items()
    ]


def told_apart(contenders: Sequence[Contender]) -> list[Contender]:
    """Each once, under a label of its own: what is derived or solved here may be called as a schedule that is named."""
    found: dict[str, Contender] = {}
    for each in contenders:
        one = each
        while found.setdefault(one.label, one).identity != one.identity:
            one = replace(one, name=f"{one.name} (fitted here)")
    return [*found.values()]


def read_prompts(
    config: EvaluateSchedule, part: Part, count: int, tokenizer: Tokenizer, shape: ModelShape
) -> list[Prompt]:
    """Rows of a part as prompts. Raises JobError."""
    columns = [config.id_column, config.text_column, config.reference_column]
    keep = list(dict.fromkeys(column for column in columns if column))
    drawn = sample_prompts(config, part, count, tokenizer, longest_prompt(config, shape), keep)
    sources = names(drawn[config.text_column])
    ids = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in sources]
    if config.id_column:
        ids = names(drawn[config.id_column], ids)
    references = [""] * len(ids)
    if config.reference_column:  # invalid UTF-8 is mended already, null is none
        references = [text if isinstance(text, str) else "" for text in texts(drawn[config.reference_column])]
    prompts = [
        Prompt(name, source, reference, tuple(tokens), tokenizer.decode(tokens))
        for name, source, reference, tokens in zip(ids, sources, references, drawn[TOKENS].to_pylist(), strict=True)
    ]
    if len(prompts) < 2:
        raise JobError(f"the {part} part of {config.input!r} has one usable row: give a larger input")
    if again := len(prompts) - len({prompt.tokens for prompt in prompts}):
        log.warning("%d of the prompts are others once more: intervals are narrower than they should be", again)
    return prompts


def warn_of_seen_rows(config: EvaluateSchedule, contenders: Sequence[Contender]) -> None:
    """Say which contenders may have been made from rows that they are judged on."""
    if config.part in ("all", "calibrate") and (config.rivals or config.needs_bridges):
        log.warning("rivals and bridges are made from the calibrate part, and judged on the %s part", config.part)
    for contender in contenders:
        provenance = getattr(contender.method, "provenance", {})
        for how, record in made_from(provenance, config.part, config.parted_by):
            log.warning(
                "%s was %s on the %s part by %s, and is judged on the %s part by %s: where both are of one input, "
                "it has seen some of these rows",
                contender.label, how, record["part"], record["parted_by"], config.part, config.parted_by,
            )  # fmt: skip


def warn_of_another_report(figures_file: Path, config: Mapping[str, Any], labels: Sequence[str]) -> None:
    """Say what an earlier call's report had that the one in its place has not."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # none is there, or no whole one
        before = json.loads(figures_file.read_text())
        was = before["config"]
        other = [name for name in {**was, **config} if name not in MAY_CHANGE and config.get(name) != was.get(name)]
        gone = [each["label"] for each in before["contenders"] if each["label"] not in labels]
        if said := [*(f"other {name}" for name in other), *(f"{label!r} is not in it" for label in gone)]:
            log.warning("the report of an earlier call is replaced (%s); its outputs stay", ", ".join(said))


def _table(found: Sequence[Figures]) -> Table:
    title = f"{found[0].rows} prompts, 95 % intervals"
    table = Table("contender", title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    columns: dict[str, Callable[[Figures], Estimate | None]] = {
        "sample\nFLOP x": lambda each: each.sample_flop_speedup,
        "decode\nFLOP x": lambda each: each.decode_flop_speedup,
        "excess NLL": lambda each: each.excess_nll,
        "ROUGE-L\nshare": lambda each: each.share_of_full_depth["rouge_l"],
        "repe-\ntition": lambda each: each.repetition,
        "unsup-\nported": lambda each: each.unsupported,
    }
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)  # a long name gives way, a figure does not
    for each in found:
        table.add_row(Text(each.label), *(_shown(of(each), heading == "excess NLL") for heading, of in columns.items()))
    return table


def _shown(estimate: Estimate | None, interval: bool) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.value:.3f}" + f" [{estimate.low:.3f}, {estimate.high:.3f}]" * interval


if __name__ == "__main__":
    sys.exit(command_line.start(EvaluateSchedule, PROGRAM, evaluate))
