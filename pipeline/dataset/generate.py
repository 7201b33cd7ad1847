"""Generate a data set: run the job, filter what it committed, publish shards and a card."""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from pipeline.commits.commit import SUCCESS_FILE, Commit, checksum, open_rows, read_commits, total
from pipeline.commits.manifest import read_manifest
from pipeline.dataset import openai_batch
from pipeline.dataset.card import is_signed, write_card
from pipeline.dataset.config import FOLDER, GENERATION, SPLIT, DatasetConfig
from pipeline.dataset.filters import FILTERED, Filters
from pipeline.errors import JobError, NothingToDo
from pipeline.preparing.backend import Backend
from pipeline.preparing.preparation import absolute_paths
from pipeline.preparing.run_record import begun_columns, read_run
from pipeline.rows.rows import SAMPLE, chosen, output_schema
from pipeline.run import RunResult, leased, run_leased
from pipeline.storage.ownership import Kind, check_place, own, remove, unfinished
from pipeline.storage.records import LARGE, Count, Fingerprint, OpenRecord, PublishedFile, Record
from pipeline.storage.storage import Storage
from pipeline.storage.stores import Unfit
from pipeline.values.row_groups import read_parquet, to_parquet

log = logging.getLogger(__name__)

MANIFEST, CARD, CARD_BESIDE = "_DATASET.json", "README.md", "_README.md"
SHARD_BYTES = 2**29  # of rows in memory, at which a shard ends though it has fewer than it may
LEFT_OUT = ("error", "shared_prefix_tokens")  # columns that are the same in every row that is kept


class _File(OpenRecord):
    file: PublishedFile
    rows: Count


class _DatasetManifest(OpenRecord):
    run: Fingerprint
    rows: Count
    dropped: dict[str, Count]
    files: list[_File]


_RECORD: Record[dict[str, Any]] = Record(
    _DatasetManifest, "delete it, and start the job again: the data set is published anew from the run", LARGE
)


@dataclass(frozen=True, slots=True)
class DatasetResult:
    """A published data set and the run behind it."""

    output: str
    run: RunResult
    kept: int
    dropped: dict[str, int]  # by filter
    files: list[str]


def generation_config(config: DatasetConfig) -> DatasetConfig:
    """The run behind a data set: its output, and for a file of requests its input and options.

    Raises:
        JobError: the output is not the data set's to write to, or the requests cannot be answered.
    """
    output = config.output.rstrip("/")
    storage = config.output_storage().at_first()
    check_place(storage, Kind.DATA_SET, config.input_storage())
    update: dict[str, Any] = {"output": f"{output}/{GENERATION}"}
    requests = None
    if config.input_format == "openai-batch":
        requests = openai_batch.read_requests(config.input_storage().at_first())
        update |= {
            "input": f"{output}/{openai_batch.REQUESTS}",
            "s3_anonymous_input": False,
            "text_column": openai_batch.MESSAGES,
            "id_column": openai_batch.ID,
            "keep_columns": None,
            "prompt": "{text}",
            "system": None,
            "prompt_format": "messages",
            **requests.options,
        }
        if unused := sorted(config.model_fields_set & {*update} - {"input", "output", "s3_anonymous_input"}):
            log.warning("the requests say what is generated: %s of this job is not used", ", ".join(unused))
    try:
        job = DatasetConfig(**{**config.model_dump(), **update})
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise JobError(f"what the requests ask for does not go with this job's options: {first['msg']}") from error
        raise JobError(f"the requests ask for {first['loc'][0]} {first['input']!r}: {first['msg']}") from error
    if requests is None:
        return job
    begun = None if config.fresh or config.plan else read_run(job.output_storage().at_first())
    if begun is not None and not str(begun["input"].get("root")).endswith(f"/{openai_batch.name_of(requests)}"):
        raise JobError(
            f"output {config.output!r} belongs to run {begun['fingerprint']}, which differs in input: {config.input!r} "
            "holds other requests; name another output, go back to that run's to resume it, or discard it with --fresh"
        )
    return job.model_copy(update={"input": f"{output}/{openai_batch.write_requests(storage, requests)}"})


def generate_dataset(config: DatasetConfig, backend: Backend | None = None) -> DatasetResult:
    """Run, filter, publish. Rerun to resume; other filters on the same run filter its committed rows again.

    Raises:
        JobError, ModelError, ScheduleError, JobStopped, NothingToDo, UnitsFailed: as `run_job`.
    """
    filters = Filters(config)  # a schema that cannot be used should not come to light after a night of generation
    job = generation_config(config)
    with leased(job) as lease:
        storage = config.output_storage()
        if lease is not None:  # publishing may take longer than it lasts
            storage = storage.guarded(lease.check)
        try:
            result = run_leased(job, backend, lease)
        except NothingToDo:  # the input of a finished run is gone, which may not be published, or under other filters
            _publish(config, job, storage, filters)
            raise
        manifest = _publish(config, job, storage, filters)
    return DatasetResult(
        config.output, result, manifest["rows"], manifest["dropped"], [entry["file"] for entry in manifest["files"]]
    )


def _publish(config: DatasetConfig, job: DatasetConfig, storage: Storage, filters: Filters) -> dict[str, Any]:
    """The data set's manifest; what it lists is written unless it is there as it should be."""
    success = read_manifest(job.output_storage())
    if success is None:
        raise JobError(f"{SUCCESS_FILE} of {job.output!r} vanished while its data set was made: who deletes it?")
    wanted = json.loads(json.dumps(
        {"run": success["fingerprint"], "commits": _state(success), "filters": filters.described,
         "format": config.output_format, "rows_per_shard": config.rows_per_shard, "name": config.dataset_name,
         "license": config.dataset_license}
    ))  # fmt: skip
    manifest = (_RECORD.sound if config.fresh else _RECORD.read)(storage, MANIFEST) or {}
    if {name: manifest.get(name) for name in wanted} != wanted or not _is_there(config, storage, manifest):
        remove(storage, Kind.DATA_SET, [MANIFEST])  # what it lists is about to be replaced
        commits = _listed(job.output_storage(), success)
        tables = _committed(job.output_storage(), commits)
        if config.output_format == "openai-batch":
            files, cards = _write_responses(config, storage, tables, filters, success["fingerprint"]), set[str]()
        else:
            kept = _kept(tables, filters)
            if (first := next(kept, None)) is None:
                first = _no_rows(config, job)
            files = _write_shards(storage, chain([first], kept), config.rows_per_shard)
            cards = {card := CARD if _may_write_card(storage) else CARD_BESIDE}
            storage.write(card, write_card(config, success, total(commits), filters, first.schema).encode())
        written = cards | {entry["file"] for entry in files}
        remove(storage, Kind.DATA_SET, _stale(job, storage, manifest, written))
        manifest = {**wanted, "rows": filters.kept, "dropped": filters.dropped, "files": files}
        storage.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    if manifest["dropped"] and not manifest["rows"]:
        most, rows = max(manifest["dropped"].items(), key=lambda item: item[1])
        log.warning(
            "all %d rows of %r were dropped, most of them (%d) under %s: look at them in %s, and %s",
            sum(manifest["dropped"].values()), config.output, rows, most, job.output,
            "mend what their errors name" if most == "error" else "name other filters",
        )  # fmt: skip
    return manifest


def _no_rows(config: DatasetConfig, job: DatasetConfig) -> pa.Table:
    """What is published of an incremental run that has had rows, or may get some. Raises JobError for any other."""
    begun = begun_columns(job.output_storage(), absolute_paths(job)) if config.incremental else None
    if begun is None:
        raise JobError(f"input {config.input!r} has no rows: there is no data set to make")
    return _published(_numbered(output_schema(begun.schema).empty_table()))


def _stale(job: DatasetConfig, storage: Storage, before: Mapping[str, Any], written: set[str]) -> list[str]:
    """Shards and cards of an earlier data set, what was published in another format, and earlier requests.

    Lines of answers have names that anyone may give a file: they are an earlier data set's if that was of this format,
    or died while it was published, as only one of requests can have.
    """
    requests = set(storage.names(openai_batch.REQUESTS))
    there = {*own(Kind.DATA_SET, {*_there(storage), *requests}), *unfinished(storage, Kind.DATA_SET)} - {MANIFEST}
    keep = written | {name for name in requests if job.input.endswith(f"/{name}")}
    keep |= {name for name in (CARD, CARD_BESIDE) if name in there - keep and _is_anothers(storage, name)}
    if before.get("format", job.input_format) != "openai-batch":
        keep |= {openai_batch.OUTPUT_FILE, openai_batch.ERRORS_FILE}
    return sorted(there - keep)


def unpublished(storage: Storage, success: Mapping[str, Any]) -> str:
    """Why what is published here is not the data set of the finished run behind it, in words; '' if it is."""
    manifest = _RECORD.read(storage, MANIFEST)
    if manifest is None:
        return "it is not published yet"
    if (manifest["run"], manifest.get("commits")) != (success["fingerprint"], _state(success)):
        return "what is published is of an earlier state of the run"
    there = _there(storage)
    gone = [entry["file"] for entry in manifest["files"] if entry["file"] not in there]
    return f"{gone[0]} is not there, and {len(gone) - 1} more of its files" if gone else ""


def damaged_files(storage: Storage) -> list[str]:
    """Those of the files that are published here, if any are, that are not what was written."""
    files = (_RECORD.read(storage, MANIFEST) or {"files": []})["files"]
    # Earlier versions had no checksums of answers.
    listed = ((entry["file"], entry.get("checksum")) for entry in files)
    return [file for file, wanted in listed if wanted is not None and checksum(storage.read(file) or b"") != wanted]


def _state(success: Mapping[str, Any]) -> str:
    """Of a run that has finished: an incremental one has more commits every night."""
    return checksum(json.dumps(success["commits"]).encode())


def _is_there(config: DatasetConfig, storage: Storage, manifest: dict[str, Any]) -> bool:
    """Whether all that was published still is, to the byte's count."""
    there, card = _there(storage), {CARD} if config.output_format == "parquet" else set()
    listed = {entry["file"]: entry for entry in manifest["files"]}
    if not there.keys() >= card | listed.keys():
        return False
    return all(there[file] == entry.get("size", there[file]) for file, entry in listed.items())


def _there(storage: Storage) -> dict[str, int]:
    """What lies in an output, as far as data sets write to it, and its bytes."""
    return storage.sizes() | storage.sizes(FOLDER)


def _listed(storage: Storage, success: dict[str, Any]) -> list[Commit]:
    """Commits of the run's manifest in input order."""
    listed = {entry["file"] for entry in success["commits"]}
    return sorted((each for each in read_commits(storage) if each.file in listed), key=lambda commit: commit.place)


def _committed(storage: Storage, commits: Iterable[Commit]) -> Iterator[pa.Table]:
    """Of commits, with the number of their sample."""
    for commit in commits:
        with open_rows(storage, commit) as stream:
            yield _numbered(read_parquet(stream))


def _numbered(table: pa.Table) -> pa.Table:
    """With a column that says which sample of its row each is."""
    if SAMPLE in table.column_names:
        return table
    only = pa.repeat(pa.scalar(0, pa.int32()), table.num_rows)  # one of each row
    return table.add_column(table.column_names.index("generation"), pa.field(SAMPLE, pa.int32()), only)


def _kept(tables: Iterable[pa.Table], filters: Filters) -> Iterator[pa.Table]:
    """What passes the filters, a table each."""
    for table in tables:
        # Other columns may hold what Python has no value for.
        keep = [filters.reason_to_drop(row) is None for row in table.select(FILTERED).to_pylist()]
        yield _published(chosen(table, keep))


def _published(table: pa.Table) -> pa.Table:
    return table.drop_columns(list(LEFT_OUT))


def _write_shards(storage: Storage, tables: Iterable[pa.Table], rows_per_shard: int) -> list[dict[str, Any]]:
    """Write the rows of one or more tables. What the manifest lists.

    Each is written whole under its number, so that writing again replaces the same objects. Raises StorageGone,
    StorageRefused.
    """
    return [
        _write(storage, f"{FOLDER}/{SPLIT}-{number:05d}.parquet", to_parquet(table), table.num_rows)
        for number, table in enumerate(_cut(tables, rows_per_shard))
    ]


def _cut(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of so many, of less where they are wide, the last too; at least one: an empty data set
    has a schema too.
    """
    parts: list[pa.Table] = []
    held, size, is_cut = 0, 0, False
    for table in tables:
        while held + table.num_rows >= rows:
            yield pa.concat_tables([*parts, table.slice(0, rows - held)])
            table, parts, held, size, is_cut = table.slice(rows - held), [], 0, 0, True
        parts.append(table)
        held += table.num_rows
        size += table.nbytes
        if size >= SHARD_BYTES:
            yield pa.concat_tables(parts)
            parts, held, size, is_cut = [], 0, 0, True
    if held or not is_cut:
        yield pa.concat_tables(parts)


def _may_write_card(storage: Storage) -> bool:
    """Whether there is no card, or one as this project wrote it. Who has edited it keeps it."""
    if not _is_anothers(storage, CARD):
        return True
    log.warning("%s of %r was not written by this job, or edited since: it stays, the new card is %s",
                CARD, storage.url, CARD_BESIDE)  # fmt: skip
    return False


def _is_anothers(storage: Storage, card: str) -> bool:
    """Whether there is one that is not as this project wrote it."""
    try:
        standing = storage.read(card, LARGE)
    except Unfit:
        return True
    return standing is not None and not is_signed(standing)


def _write_responses(
    config: DatasetConfig, storage: Storage, tables: Iterable[pa.Table], filters: Filters, run: str
) -> list[dict[str, Any]]:
    rows = [
        {**row, "dropped": filters.reason_to_drop(row)}
        for table in tables
        for row in table.select(openai_batch.ANSWERED).to_pylist()
    ]
    answers, errors = openai_batch.responses(rows, run, config.model, int(time.time()))
    files = {openai_batch.OUTPUT_FILE: answers, openai_batch.ERRORS_FILE: errors}
    return [_write(storage, name, content.encode(), content.count("\n")) for name, content in files.items()]


def _write(storage: Storage, name: str, content: bytes, rows: int) -> dict[str, Any]:
    """Write a file of a data set; what the manifest lists."""
    storage.write(name, content)
    return {"file": name, "rows": rows, "size": len(content), "checksum": checksum(content)}
