"""Fit a configuration to a model: the schedule it names and the longest prompt it leaves room for."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from math import floor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine import ModelShape, Schedule, ScheduleError, brief, for_target_speedup
from engine.schedules.schedule_file import ADAPTER_FILE, BRIDGES_FILE, SCHEDULE_FILE
from pipeline.config import AnswerConfig, GenerationConfig
from pipeline.errors import JobError
from pipeline.inputs.sample_prompts import Part
from pipeline.storage.settings import StorageConfig
from pipeline.storage.storage import Storage

log = logging.getLogger(__name__)

TYPICAL_PROMPT = 256  # tokens; a plain schedule's speed-up hardly depends on it


def choose_schedule(config: GenerationConfig, shape: ModelShape, settings: StorageConfig | None = None) -> Schedule:
    """The schedule the configuration names.

    Raises ScheduleError if it does not fit or cannot be met, JobError for storage that cannot be read.
    """
    if config.schedule is not None:
        schedule = read_schedule(config.schedule, config.target_speedup, settings)
        schedule.check_fits(shape)
        return schedule
    if config.target_speedup is None or config.target_speedup == 1.0:
        return Schedule.full_depth(shape.layers)
    log.info("a plain schedule: calibrate_schedule.py makes one for your prompts that keeps far more quality")
    return for_target_speedup(config.target_speedup, [(TYPICAL_PROMPT, max(2, config.max_new_tokens))], shape)


def read_schedule(path: str, target: float | None, settings: StorageConfig | None = None) -> Schedule:
    """A schedule, or of several calibrated ones below a directory the one made for the target, else the one that
    just reaches it.

    Raises ScheduleError if there is none that can be read, none that fast, or no telling which; JobError as
    `read_schedules`.
    """
    schedules = read_schedules(path, settings)
    if "" in schedules:
        if target is not None:
            raise ScheduleError(
                f"{path!r} is one schedule, so target_speedup has nothing to choose from: leave it out, or name a "
                "directory of calibrated schedules"
            )
        return schedules[""]
    whole = {
        name
        for name, schedule in schedules.items()
        if schedule.prompt_bridge is not None or "target_sample_speedup" in schedule.provenance
    }
    if whole and len(whole) < len(schedules):
        why = "" if target is None else "target_speedup could mean either, so "
        raise ScheduleError(
            f"{path!r} holds schedules that make the whole sample cheaper ({', '.join(sorted(whole))}) and others: "
            f"{why}name one of them"
        )
    made_for, figure = "target_speedup", "decode_flop_speedup"
    if whole:
        made_for, figure = "target_sample_speedup", "sample_flop_speedup"
    told = {name: it.provenance for name, it in schedules.items() if figure in it.provenance}
    speedups = {name: float(provenance[figure]) for name, provenance in told.items()}
    if not speedups:
        raise ScheduleError(f"{path!r} holds several schedules that do not say how fast they are: name one of them")
    # None that it would not reach.
    targets = [told[name].get(made_for) or floor(100 * speedup + 1e-6) / 100 for name, speedup in speedups.items()]
    offered = ", ".join(f"{target:g}x" for target in sorted(targets))
    if target is None:
        raise ScheduleError(f"{path!r} holds several schedules: choose one with target_speedup, among {offered}")
    for name, provenance in told.items():
        if provenance.get(made_for) == target:  # whatever other lengths, or training, have made of it since
            log.info("the schedule %s, made for %gx, of %.2fx", name, target, speedups[name])
            return schedules[name]
    enough = [name for name, speedup in speedups.items() if speedup >= target]
    if not enough:
        raise ScheduleError(f"{path!r} holds no schedule of {target:g}x, only {offered}: calibrate one or ask for less")
    chosen = min(enough, key=lambda name: speedups[name])
    log.info("the schedule %s, of %.2fx, is the slowest that reaches %gx", chosen, speedups[chosen], target)
    return schedules[chosen]


def read_schedules(path: str, settings: StorageConfig | None = None) -> dict[str, Schedule]:
    """The calibrated schedules in directories below a path or URL, by their names; or, under "", the one it is itself.

    Raises ScheduleError if there is none, or one cannot be read; JobError if the storage of a URL cannot.
    """
    if "://" not in path:
        return _read_local(path)
    with TemporaryDirectory() as copy:
        _fetch(Storage(path.removesuffix(f"/{SCHEDULE_FILE}"), settings).at_first(), Path(copy))
        try:
            return _read_local(copy)
        except ScheduleError as error:
            raise ScheduleError(str(error).replace(copy, path)) from None


def warn_of_another_model(schedule: Schedule, model: str, identity: str) -> None:
    """Say so where a schedule was made for other weights: of what is fitted, only the shape can be checked."""
    name, known = model_of(schedule) or (model, identity)
    if known != identity:
        log.warning(
            "the schedule was made for the model %s, and %s is another one, or another version of it: what "
            "stands in for its layers may not fit, so judge it (evaluate_schedule.py) or calibrate anew",
            brief(name), model,
        )  # fmt: skip


def model_of(schedule: Schedule) -> tuple[str, str] | None:
    """Name and identity of the model that a schedule was trained for last, or else calibrated."""
    for made in ("adapted_on", "calibrated_on"):
        match schedule.provenance.get(made):
            case {"model": [str(name), str(identity), *_]}:
                return name, identity
    return None


def made_from(provenance: Mapping[str, Any], part: Part, parted_by: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """How a schedule was made from prompts that may be of a part, where both are of one input, and the record of it."""
    records = [("calibrated", provenance.get("calibrated_on")), ("trained", provenance.get("adapted_on"))]
    records += [("trained", record) for record in provenance.get("adapted_before", [])]
    for how, known in records:
        if known is not None:
            record = {**known, "part": known.get("part") or "all", "parted_by": known.get("parted_by", "id")}
            if "all" in (record["part"], part) or record["part"] == part or record["parted_by"] != parted_by:
                yield how, record


def _fetch(storage: Storage, directory: Path) -> None:
    """Copy the files of a schedule, or of those in the folders below."""
    folders = [""]
    if storage.read(SCHEDULE_FILE) is None:
        folders = [name for name in storage.entries() if name.endswith("/")]
    for folder in folders:
        for name in (SCHEDULE_FILE, BRIDGES_FILE, ADAPTER_FILE):
            content = storage.read(folder + name)
            if content is not None:
                (directory / folder).mkdir(exist_ok=True)
                (directory / folder / name).write_bytes(content)


def _read_local(path: str) -> dict[str, Schedule]:
    """`read_schedules` of a local path."""
    directory = Path(path)
    # A Path raises for a name too long.
    if os.path.isfile(directory / SCHEDULE_FILE) or not os.path.isdir(directory):
        return {"": Schedule.read(path)}
    files = sorted(directory.glob(f"[!.]*/{SCHEDULE_FILE}"))  # hidden ones are no more found than in a store
    found = {file.parent.name: Schedule.read(file.parent) for file in files}
    if not found:
        raise ScheduleError(f"{path!r} holds no {SCHEDULE_FILE}, nor does a directory in it, so it cannot be read")
    return found


def check_no_others(output: Path, names: Iterable[str]) -> None:
    """Raises JobError for schedules of an earlier call that a directory would hold beside those of these names, "" for
    one without a directory of its own: a job that names the output may then run one of them.
    """
    there = {file.parent.name for file in output.glob(f"[!.]*/{SCHEDULE_FILE}")}
    if (output / SCHEDULE_FILE).exists():
        there.add("")
    if others := sorted(there - set(names)):
        said = ", ".join(other or SCHEDULE_FILE for other in others)
        raise JobError(
            f"{str(output)!r} holds other schedules ({said}), of which a job could run one: name another directory, or "
            "remove them"
        )


def longest_prompt(config: AnswerConfig, shape: ModelShape) -> int:
    """In tokens. Raises JobError if there is no room at all."""
    room = shape.context - config.max_new_tokens
    if room < 1:
        raise JobError(
            f"max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the model's context of "
            f"{shape.context} tokens: lower it"
        )
    return min(config.max_prompt_tokens or room, room)
