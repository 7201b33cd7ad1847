"""An output belongs to one run at a time, and what is left of an earlier one can add nothing to it."""

import base64
import json
from pathlib import Path

import pyarrow as pa
import pytest
from engine_double import EchoBackend, NoEngineBackend
from fixture_types import Job, WriteParquet
from inline_session import InlineSession

from pipeline.commits.commit import commit_unit, read_commits
from pipeline.errors import JobError, JobStopped
from pipeline.execution.session import Done
from pipeline.inspection import inspect
from pipeline.preparing.run_record import claim_output
from pipeline.rows.rows import GENERATED
from pipeline.rows.unit import WorkUnit
from pipeline.run import run_job
from pipeline.storage.ownership import discard_run
from pipeline.storage.storage import Storage, StorageRefused

RUN = {"sampling": {"seed": 0}, "version": "1", "schedule": {"layers": 2}, "input": {}}
UNIT = WorkUnit("00000-000000000", "in/a.parquet", 0, 1)
ROWS = pa.Table.from_pylist([{"mean_active_layers": 1.0, "generated_tokens": 1}], schema=GENERATED)


def test_the_second_session_of_a_run_resumes_its_claim(storage: Storage) -> None:
    first, second = claim_output(storage, RUN), claim_output(storage, RUN)
    assert (first.resuming, second.resuming) == (False, True)
    assert first.run == second.run
    second.check(storage)


def test_another_run_is_refused_and_told_what_changed(storage: Storage) -> None:
    claim_output(storage, RUN)
    with pytest.raises(JobError, match=r"differs in sampling: sampling\.seed 0 -> 7; .* discard it with --fresh"):
        claim_output(storage, {**RUN, "sampling": {"seed": 7}})


def test_of_long_values_the_part_is_shown_where_they_differ(storage: Storage) -> None:
    prompt = "Summarize this software package in one short sentence, as plainly as you can."
    claim_output(storage, {**RUN, "prompt": prompt + " Begin with its name."})
    with pytest.raises(
        JobError, match=r"prompt \.\.\..*plainly as you can\. Begin with.* -> \.\.\..*as you can\. End with"
    ):
        claim_output(storage, {**RUN, "prompt": prompt + " End with its name."})


def test_where_the_input_has_got_columns_those_that_it_had_can_be_named(storage: Storage) -> None:
    had = ["text: string", "the day: list<element: date32[day]>"]
    claim_output(storage, {**RUN, "input": {"kept": had}})
    with pytest.raises(
        JobError, match=r"resume it with the columns that its input had \(--keep-columns text 'the day'\)"
    ):
        claim_output(storage, {**RUN, "input": {"kept": [*had, "new: int64"]}})
    with pytest.raises(JobError, match="go back to that run's settings"):
        claim_output(storage, {**RUN, "input": {"kept": ["text: string", "the day: date64[ms]"]}})
    with pytest.raises(JobError, match="go back to that run's settings"):
        claim_output(storage, {**RUN, "version": "2", "input": {"kept": [*had, "new: int64"]}})


def test_a_setting_that_only_one_of_two_runs_has_is_named(storage: Storage) -> None:
    claim_output(storage, {**RUN, "engine": "vllm"})
    with pytest.raises(JobError, match=r'which differs in engine: engine "vllm" -> null; name another'):
        claim_output(storage, RUN)
    with pytest.raises(JobError, match=r'which differs in cache_dtype, engine: cache_dtype null -> "fp8", engine'):
        claim_output(storage, {**RUN, "cache_dtype": "fp8"})


def test_a_zombie_from_before_fresh_can_neither_commit_nor_finish(storage: Storage) -> None:
    zombie = claim_output(storage, RUN)
    discard_run(storage)
    claim = claim_output(storage, RUN)  # the same settings, another claim
    commit_unit(storage, UNIT, ROWS, claim.run)
    with pytest.raises(JobError, match="a process of that run still wrote here"):
        commit_unit(storage, UNIT, ROWS, zombie.run)
    with pytest.raises(JobError, match="was discarded by another job with --fresh"):
        zombie.check(storage)
    assert [commit.run for commit in read_commits(storage, claim.run)] == [claim.run]


def test_a_run_whose_output_was_given_away_meanwhile_sweeps_and_publishes_nothing(
    job: Job, write_parquet: WriteParquet, tmp_path: Path, storage: Storage, inline: type[InlineSession],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    theirs = f"data/00007-000000000-{'0' * 12}.parquet"
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["one"]})

    def given_away(_session: object, _unit: WorkUnit) -> None:
        discard_run(storage)
        claim_output(storage, RUN)
        storage.write(theirs, b"theirs")

    monkeypatch.setattr(inline, "begin_unit", given_away)
    with pytest.raises(JobError, match="was discarded by another job with --fresh"):
        run_job(job(), EchoBackend())
    assert storage.read(theirs) == b"theirs"
    assert storage.read("_SUCCESS.json") is None


def test_a_job_whose_run_is_discarded_as_it_ends_says_so_and_not_that_records_of_the_other_are_damaged(
    job: Job, write_parquet: WriteParquet, tmp_path: Path, storage: Storage, inline: type[InlineSession],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["one"]})
    ours = inline.run

    def given_away(self: InlineSession, units: list[WorkUnit]) -> Done:
        done = ours(self, units)
        discard_run(storage)
        claim_output(storage, RUN)
        return done

    monkeypatch.setattr(inline, "run", given_away)
    with pytest.raises(JobError, match="was discarded by another job with --fresh"):
        run_job(job(), EchoBackend())


def test_a_finished_run_that_lacks_a_unit_is_unfinished_until_that_is_done_again(
    job: Job, write_parquet: WriteParquet, tmp_path: Path, storage: Storage, inline: type[InlineSession],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["one"]})
    run_job(job(), EchoBackend())
    (commit,) = read_commits(storage)
    storage.remove([f"_commits/{commit.unit}.json", commit.file])

    def stopped(_session: object, _unit: WorkUnit) -> None:
        raise JobStopped("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(inline, "begin_unit", stopped)
        with pytest.raises(JobStopped):
            run_job(job(), EchoBackend())
    assert inspect(storage).manifest is None, "it would tell readers of a file that is not there"
    run_job(job(), EchoBackend())
    assert inspect(storage).state == "done"


@pytest.mark.usefixtures("inline")
def test_who_may_not_write_is_told_so_before_an_engine_is_loaded_also_where_a_run_goes_on(
    job: Job, write_parquet: WriteParquet, tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["one", "two"]})
    run_job(job(rows_per_unit=1), EchoBackend())
    whole, commit = storage.read("_SUCCESS.json"), read_commits(storage)[0]

    def refused(_storage: Storage, _names: object, *_: object) -> bool:
        raise StorageRefused("may not write")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write_if_absent", refused)
        assert run_job(job(rows_per_unit=1), NoEngineBackend()).rows_resumed == 2, "nothing is left to write"
        storage.remove([f"_commits/{commit.unit}.json"])
        with pytest.raises(StorageRefused):
            run_job(job(rows_per_unit=1), NoEngineBackend())
    assert storage.read("_SUCCESS.json") == whole


def test_a_commit_that_a_zombie_made_first_is_noticed(storage: Storage) -> None:
    zombie = claim_output(storage, RUN)
    discard_run(storage)
    claim = claim_output(storage, RUN)
    commit_unit(storage, UNIT, ROWS, zombie.run)
    with pytest.raises(JobError, match="end it, then start this job with --fresh"):
        read_commits(storage, claim.run)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_damaged_record_is_named(storage: Storage, content: bytes) -> None:
    storage.write("_run.json", content)
    with pytest.raises(JobError, match=r"_run\.json .* is damaged .* --fresh"):
        claim_output(storage, RUN)


def test_a_changed_model_is_named_by_its_file(storage: Storage) -> None:
    was = RUN | {"model": ["m", "digest", "float32"], "model_files": {"model.safetensors": "1", "tokenizer.json": "1"}}
    now = RUN | {"model": ["m", "other", "float32"], "model_files": {"model.safetensors": "2", "tokenizer.json": "1"}}
    claim_output(storage, was)
    with pytest.raises(
        JobError, match=r"which differs in model: the weights file model\.safetensors differs; name another output"
    ):
        claim_output(storage, now)


def test_the_date_of_a_run_is_that_of_its_first_session(storage: Storage) -> None:
    claim_output(storage, RUN)
    record = json.loads(storage.read("_run.json") or b"") | {"began": "2020-02-29T12:00:00"}
    storage.write("_run.json", json.dumps(record).encode())
    assert claim_output(storage, RUN).began == "2020-02-29T12:00:00"


def damaged_by(storage: Storage, **changes: object) -> None:
    record = json.loads(storage.read("_run.json") or b"") | changes
    storage.write("_run.json", json.dumps(record).encode())


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("no base64!", "kept_schema: "),
        ("aGVsbG8=", "kept_schema: "),
        (pa.schema([("a", pa.int8()), ("a", pa.int8())]), "kept_schema: a column stands there twice"),
        (pa.schema([("a", pa.int8())]), "its kept_schema is not of the columns that its input says are kept"),
    ],
)
def test_a_schema_that_a_run_cannot_have_is_damage(
    job: Job, write_parquet: WriteParquet, tmp_path: Path, storage: Storage, schema: str | pa.Schema, said: str
) -> None:
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["one"]})
    run_job(job(), EchoBackend())
    if isinstance(schema, pa.Schema):
        schema = base64.b64encode(schema.serialize()).decode()
    damaged_by(storage, kept_schema=schema)
    with pytest.raises(JobError, match=rf"_run\.json of .* is damaged \({said}.*: discard the run with --fresh"):
        run_job(job(), NoEngineBackend())
