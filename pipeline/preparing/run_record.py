"""What names a run: a fingerprint of everything that decides its output. Resuming needs the same one."""

import base64
import hashlib
import json
import shlex
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Annotated, Any, NamedTuple, NotRequired

import pyarrow as pa
from pydantic import AfterValidator, Field

import engine
from engine import Schedule
from pipeline.commits.commit import SUCCESS_FILE
from pipeline.config import JobConfig
from pipeline.errors import JobError, one_line
from pipeline.inputs.work import Plan
from pipeline.preparing.backend import ModelIdentity
from pipeline.redaction import redacted
from pipeline.storage.records import LARGE, Count, Fingerprint, OpenRecord, Record
from pipeline.storage.storage import Storage, absolute

RUN_FILE = "_run.json"
NO_SETTINGS = ("fingerprint", "claim", "began", "kept_schema")  # of a record, beside what describes the run
MOST_SHOWN = 60  # characters of a value in a message
EARLIER = "the earlier version of this project that began it"


class _Schedule(OpenRecord):
    layers: Annotated[int, Field(ge=1, le=100_000)]


class _Input(OpenRecord, total=False):
    incremental: bool
    limit: Count | None


class _Sampling(OpenRecord, total=False):
    samples_per_prompt: Count


def _decoded(schema: str) -> pa.Schema:
    """Of an Arrow IPC message in base64. Raises ValueError."""
    try:
        decoded = pa.ipc.read_schema(pa.BufferReader(base64.b64decode(schema, validate=True)))
    except (OSError, pa.ArrowException) as error:
        raise ValueError(one_line(error)) from None
    if len(set(decoded.names)) < len(decoded.names):  # a name that is no text is a ValueError by itself
        raise ValueError("a column stands there twice")
    return decoded


def _that(reads: Callable[[str], object]) -> AfterValidator:
    """Keeps the text that `reads` raises no ValueError for."""

    def keep(said: str) -> str:
        reads(said)
        return said

    return AfterValidator(keep)


class _Run(OpenRecord):
    """What the project reads of a run's record; all of it is the run's description."""

    fingerprint: Fingerprint
    claim: NotRequired[Fingerprint]
    began: NotRequired[Annotated[str, _that(datetime.fromisoformat)]]
    kept_schema: NotRequired[Annotated[str, _that(_decoded)]]
    schedule: _Schedule
    sampling: _Sampling
    input: _Input


_RECORD: Record[dict[str, Any]] = Record(_Run, "discard the run with --fresh", LARGE)


class Kept(NamedTuple):
    """The columns that a run keeps."""

    schema: pa.Schema
    described: list[str]  # as the run's fingerprint has them: with names within types that the schema may have lost


def describe_run(
    config: JobConfig, plan: Plan, schedule: Schedule, model: ModelIdentity, begun: Kept | None = None
) -> dict[str, Any]:
    """The parts of the fingerprint, in words a person can compare; columns as the run that has begun has them."""
    prompt_fields = (
        "text_column", "system", "prompt", "prompt_format", "max_prompt_tokens", "overlong", "parse_control_tokens"
    )  # fmt: skip
    sampling = config.sampling()
    told_vllm = {name: getattr(config, name) for name in ("engine", "quantization", "cache_dtype")}
    return {
        "model": [config.model, model.digest, model.dtype],
        "model_files": dict(model.files),
        "schedule": schedule.to_dict(),
        "sampling": sampling.to_dict(),
        "prompt": {name: getattr(config, name) for name in prompt_fields},
        "input": _describe_input(config, plan, begun),
        "rows_per_unit": config.rows_per_unit,
        # An earlier version had a unit for each sample, of other names: its runs cannot be gone on with.
        **({"units": "rows with all their samples"} if sampling.samples_per_prompt > 1 else {}),
        "version": engine.__version__,
        # Where vLLM is named: its rounding is its own, and it leaves a schedule's head preview out.
        **{name: value for name, value in told_vllm.items() if value not in (None, "auto", "torch")},
    }


def _describe_input(config: JobConfig, plan: Plan, begun: Kept | None) -> dict[str, Any]:
    kept = [f"{field.name}: {field.type}" for field in plan.kept]
    if begun is not None and plan.kept.equals(begun.schema):
        kept = begun.described
    if config.incremental:
        # Files may come, change and go; where they lie belongs to the run, for another input may have the same names in
        # it, and so do the types of their columns, for all of the output has one schema.
        return {"incremental": True, "root": redacted(config.input), "kept": kept}
    # Which files these are is held apart, see `input_record`: one that can't be read yet must not name another run.
    return {"root": redacted(config.input), "limit": config.limit, "kept": kept}


def fingerprint(description: dict[str, Any]) -> str:
    """Name of a run, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Claim:
    """An output as the property of a run, from its first session until --fresh discards it."""

    # Its commits carry this name, so that a process left over from before a --fresh can add nothing to what came after.
    run: str
    resuming: bool  # it was this run's before
    began: str  # ISO 8601, the clock of the machine that began it: the date that chat templates see in all sessions

    def check(self, storage: Storage) -> None:
        """Raises JobError if the output has been given to another run since. StorageGone."""
        record = read_run(storage)
        if record is None or claim_name(record) != self.run:
            raise JobError(
                f"output {storage.url!r} was discarded by another job with --fresh while run {self.run} wrote to it: "
                "let one job at a time use an output"
            )


def read_run(storage: Storage) -> dict[str, Any] | None:
    """The record of the run that an output belongs to. Raises RecordDamaged; StorageGone."""
    return _RECORD.read(storage, RUN_FILE)


def claim_name(record: dict[str, Any]) -> str:
    """What the commits of a run are signed with."""
    return f"{record['fingerprint']}-{record.get('claim')}"


def as_recorded(storage: Storage, config: JobConfig) -> JobConfig:
    """The configuration with its input as the run here spells it, where that is the same: one that an earlier version
    began may have `..` in it.
    """
    record = _RECORD.sound(storage, RUN_FILE)  # of a damaged one claiming the output says so
    root = str(record["input"].get("root")) if record is not None else ""
    same = root.startswith("/") and absolute(root) == config.input
    return config.model_copy(update={"input": root}) if same else config


def check_incremental(storage: Storage) -> None:
    """Raises JobError if the run here is none that looks for new files. StorageGone."""
    record = _RECORD.sound(storage, RUN_FILE)  # of a damaged one claiming the output says so
    if record is not None and not record["input"].get("incremental"):
        raise JobError(
            f"output {storage.url!r} belongs to run {record.get('fingerprint')}, which is not incremental: leave "
            "--incremental out to resume it, name another output, or discard it with --fresh"
        )


def begun_columns(storage: Storage, config: JobConfig) -> Kept | None:
    """Those of a run of the same input that is here; None if there is none, or one of an earlier version, and for a
    damaged record, of which claiming the output says so.
    """
    record = _RECORD.sound(storage, RUN_FILE)
    if record is None or record["input"].get("root") != redacted(config.input) or "kept_schema" not in record:
        return None
    schema, described = _decoded(record["kept_schema"]), record["input"].get("kept")
    begins = [f"{name}: " for name in schema.names]
    is_list = isinstance(described, list) and len(described) == len(begins)
    if not is_list or not all(map(str.startswith, map(str, described), begins)):
        raise _RECORD.damaged(storage, RUN_FILE, "its kept_schema is not of the columns that its input says are kept")
    return Kept(schema, described)


def claim_output(storage: Storage, description: dict[str, Any], kept: pa.Schema | None = None) -> Claim:
    """Make the output this run's, that keeps such columns. Raises JobError if it belongs to another one, with what
    differs; StorageGone.
    """
    began = datetime.now().isoformat(timespec="seconds")
    claim = uuid.uuid4().hex[:8]
    record = {"fingerprint": fingerprint(description), "claim": claim, "began": began, **description}
    if kept is not None:
        record["kept_schema"] = base64.b64encode(kept.serialize()).decode()
    existing = read_run(storage)
    if existing is None:
        storage.prove_put_if_absent()  # once for a run: where there is a record, it was
        if storage.write_if_absent(RUN_FILE, json.dumps(record, indent=1).encode()):
            return Claim(claim_name(record), resuming=False, began=began)
        existing = read_run(storage) or {}
    if existing.get("fingerprint") == record["fingerprint"]:
        return Claim(claim_name(existing), resuming=True, began=str(existing.get("began") or began))
    parts, details, changes = _differences(existing, json.loads(json.dumps(description)))
    raise JobError(
        f"output {storage.url!r} belongs to run {existing.get('fingerprint')}, which differs in {', '.join(parts)}: "
        f"{details}; name another output, {_way_back(parts, changes, SUCCESS_FILE in storage.entries())}, "
        "or discard it with --fresh"
    )


def started_again(run: Mapping[str, Any]) -> str:
    """What goes on with a run that a record tells of, as an order."""
    samples = run["sampling"].get("samples_per_prompt", 1)
    return "start the same job again" + (f" with {EARLIER}" if samples > 1 and "units" not in run else "")


def _way_back(parts: list[str], changes: list[tuple[str, Any, Any]], finished: bool) -> str:
    """To the run that is there; where all that differs is columns that the input has got, by naming those it had."""
    if any(name == "units" and was is None for name, was, _ in changes):
        return f"{'publish' if finished else 'finish'} it with {EARLIER}"
    match changes:
        case [("input.incremental", True, None)]:
            return "start it with --incremental to resume it"
        case [("input.kept", list(was), list(now))] if parts == ["input"] and was and set(was) < set(now):
            columns = " ".join(shlex.quote(str(column).partition(": ")[0]) for column in was)
            return f"resume it with the columns that its input had (--keep-columns {columns})"
    return "go back to that run's settings to resume it"


def _differences(was: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], str, list[tuple[str, Any, Any]]]:
    """What differs between two runs: the parts, and each of their differences, in words and as `_changes`."""
    was = {name: value for name, value in was.items() if name not in NO_SETTINGS}
    files = [dict(run.pop("model_files", None) or {}) for run in (was, now)]
    said = engine.model_differences(*files) if all(files) else []
    changes = _changes(was, now)
    if said and was["model"][::2] == now["model"][::2]:
        # The digest of all files says nothing beside the names of those that differ.
        changes = [change for change in changes if change[0] != "model"]
    parts = dict.fromkeys([*(["model"] if said else []), *(name.split(".")[0] for name, _, _ in changes)])
    words = [f"{name} {' -> '.join(_shown(old, new))}" for name, old, new in changes]
    return list(parts), ", ".join([*said, *words]), changes


def _changes(was: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, old value, new value) of every leaf that differs."""
    if isinstance(was, dict) and isinstance(now, dict) and "." not in name:
        names = [key for key in now if was.get(key) != now[key]] + [key for key in was if key not in now]
        return [c for key in names for c in _changes(was.get(key), now.get(key), f"{name}.{key}" if name else key)]
    return [(name, was, now)] if was != now else []


def _shown(*values: Any) -> list[str]:
    """Values that differ; of long ones the part where they begin to."""
    written = [json.dumps(value) for value in values]
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*written, strict=False)))
    start = alike - MOST_SHOWN // 3 if alike > MOST_SHOWN // 2 and max(map(len, written)) > MOST_SHOWN else 0
    end = start + MOST_SHOWN
    return ["..." * (start > 0) + text[start:end] + "..." * (end < len(text)) for text in written]
