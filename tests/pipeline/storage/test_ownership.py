"""Jobs write to, write over and remove nothing but what is theirs."""

import ast
import errno
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import Echo, EchoBackend, NoEngineBackend
from huggingface_hub import DatasetCard
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jobs.job_output
import pipeline.run
from engine import ModelError, ScheduleError
from jobs.adapt_model import adapt
from jobs.adaptation import AdaptModel
from jobs.benchmarks.job import BenchmarkJob, benchmark
from jobs.calibrate_schedule import CalibrateSchedule, calibrate
from jobs.evaluate_schedule import EvaluateSchedule, evaluate
from jobs.generate_dataset import generate
from pipeline.config import JobConfig
from pipeline.dataset.config import DatasetConfig
from pipeline.dataset.generate import generate_dataset, generation_config
from pipeline.errors import JobError, JobStopped, NothingToDo, UnitsFailed
from pipeline.forecaster import forecast_run
from pipeline.run import run_job
from pipeline.storage.lease import Lease
from pipeline.storage.ownership import (
    CLAIM_FILE,
    Kind,
    check_files,
    check_place,
    claim_directory,
    claimed_at,
    own,
    remove,
)
from pipeline.storage.storage import Storage

ROOT = Path(__file__).parents[3]
ROWS = 4
TREES = int(os.environ.get("FOREIGN_TREES", "30"))
ENDS = (JobError, JobStopped, NothingToDo, UnitsFailed, ModelError, ScheduleError)


@pytest.fixture(autouse=True)
def without_an_engine(inline: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.job_output, "forecast_run", partial(forecast_run, backend=EchoBackend()))


def lay(folder: Path, files: Mapping[str, bytes]) -> dict[Path, bytes]:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return {folder / name: content for name, content in files.items()}


def corpus(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": [f"text {row}" for row in range(ROWS)]}), folder / "corpus.parquet")
    return folder


def run_config(folder: Path, **options: Any) -> JobConfig:
    given = {"input": str(folder / "in"), "output": str(folder / "out"), "prompt_format": "raw", "rows_per_unit": 2}
    return JobConfig(**{**given, "replicas": 1, **options})


def data_set_config(folder: Path, **options: Any) -> DatasetConfig:
    given = {"input": str(folder / "in"), "output": str(folder / "out"), "prompt_format": "raw", "rows_per_unit": 2}
    return DatasetConfig(**{**given, "replicas": 1, "rows_per_shard": 2, **options})


def requests(folder: Path, text: str = "hello") -> Path:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "requests.jsonl").write_text(json.dumps(line))
    return folder / "requests.jsonl"


def batch_config(folder: Path, **options: Any) -> DatasetConfig:
    formats = {"input_format": "openai-batch", "output_format": "openai-batch"}
    return data_set_config(folder, input=str(requests(folder)), **formats, **options)


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


NOTES = {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("set/data/train-00000.parquet", "set"), ("in", "in"), ("in", "in/out"), ("in/*", "in/out"), ("in", "in/a/b"),
        ("in/**", "in/out"), ("in/**/*.parquet", "in/out"), ("*/data/*.parquet", "out"), ("out/data", "out"),
        ("in/{a,out}", "in/out"), ("link", "in/out"), ("in/../in", "in/out"), ("out/*.parquet", "out"),
        ("in/ou[st]/data/*", "in/out"), ("in/corpus.parquet", "in/corpus.parquet"),
    ],
)  # fmt: skip
def test_an_output_that_overlaps_the_input_is_refused_before_anything_is_written(
    tmp_path: Path, source: str, output: str
) -> None:
    corpus(tmp_path / "in")
    corpus(tmp_path / "set/data")
    (tmp_path / "link").symlink_to("in")
    before = held(tmp_path)
    paths = {"input": str(tmp_path / source), "output": str(tmp_path / output)}
    for incremental in (False, True):
        with pytest.raises(JobError, match="overlaps input"):
            run_job(run_config(tmp_path, **paths, incremental=incremental), NoEngineBackend())
    with pytest.raises(JobError, match="overlaps input"):
        generate_dataset(data_set_config(tmp_path, **paths), NoEngineBackend())
    assert held(tmp_path) == before


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("in", "out"), ("in", "in-2"), ("in", "in/_out"), ("in/*.parquet", "in/out"), ("in/a/*.parquet", "in/out"),
        ("s3://bucket/in", "/bucket/in"), ("s3://bucket/in", "s3://bucket/in-2"), ("s3://bucket/in/*", "s3://b/in/x"),
    ],
)  # fmt: skip
def test_an_output_beside_the_input_is_not_refused(tmp_path: Path, source: str, output: str) -> None:
    storages = [Storage(path if "://" in path else str(tmp_path / path.lstrip("/"))) for path in (source, output)]
    if storages[1].is_local:
        check_place(storages[1], Kind.RUN, storages[0])
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Storage, "entries", lambda self: [])
            patch.setattr(Storage, "names", lambda self, folder: [])
            check_place(storages[1], Kind.RUN, storages[0])


def test_an_output_in_a_bucket_that_overlaps_the_input_is_refused() -> None:
    for source in ("s3://bucket/in", "s3a://bucket/in/*", "s3://bucket/in/out/data/rows.parquet", "s3://bucket/**"):
        with pytest.raises(JobError, match="overlaps input"):
            check_place(Storage("s3://bucket/in/out"), Kind.RUN, Storage(source))


def test_input_that_links_into_the_output_is_refused(tmp_path: Path) -> None:
    corpus(tmp_path / "elsewhere")
    lay(tmp_path / "out", {"_run.json": b'{"fingerprint": "0"}'})
    corpus(tmp_path / "out/data")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/more").symlink_to(tmp_path / "out/data")
    with pytest.raises(JobError, match=r"input file .*in/more/corpus.parquet' lies in output"):
        check_files(Storage(str(tmp_path / "out")), Storage(str(tmp_path / "in")),
                    [str(tmp_path / "in/more/corpus.parquet")])  # fmt: skip
    with pytest.raises(JobError, match="lies in output"):
        run_job(run_config(tmp_path), NoEngineBackend())


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("foreign", ["notes.txt", "data/train-00000.parquet", "README.md", "_commits/x"])
def test_an_output_that_holds_files_and_no_run_is_refused(tmp_path: Path, foreign: str, fresh: bool) -> None:
    corpus(tmp_path / "in")
    lay(tmp_path / "out", {foreign: b"mine"})
    tries: list[Callable[[], object]] = [
        lambda: run_job(run_config(tmp_path, fresh=fresh), NoEngineBackend()),
        lambda: run_job(run_config(tmp_path, fresh=fresh, incremental=True), NoEngineBackend()),
        lambda: jobs.job_output.show_plan(run_config(tmp_path, fresh=fresh)),
        lambda: generate_dataset(data_set_config(tmp_path, fresh=fresh), NoEngineBackend()),
        lambda: generate_dataset(batch_config(tmp_path, fresh=fresh), NoEngineBackend()),
        lambda: generate(batch_config(tmp_path, fresh=fresh, plan=True)),
    ]
    for attempt in tries:
        with pytest.raises(JobError, match=r"holds what this job did not write .*: name a new or an empty directory"):
            attempt()
        assert held(tmp_path / "out") == {foreign: b"mine"}


@pytest.mark.parametrize("fresh", [False, True])
def test_a_record_of_another_program_that_is_named_as_a_runs_makes_no_output_ours(tmp_path: Path, fresh: bool) -> None:
    corpus(tmp_path / "in")
    files = {"_run.json": b'{"id": 7}', "report.html": b"mine"}
    for name in ("out", "set/_generation"):
        lay(tmp_path / name, files)
    tries: list[Callable[[], object]] = [
        lambda: run_job(run_config(tmp_path, fresh=fresh), NoEngineBackend()),
        lambda: run_job(run_config(tmp_path, fresh=fresh, incremental=True), NoEngineBackend()),
        lambda: generate_dataset(
            data_set_config(tmp_path, output=str(tmp_path / "set"), fresh=fresh), NoEngineBackend()
        ),
    ]
    for attempt in tries:
        with pytest.raises(JobError, match=r"did not write \('_run.json', 2 in all\)"):
            attempt()
    assert held(tmp_path / "out") == held(tmp_path / "set/_generation") == files


@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_runs_record_that_is_damaged_may_be_ours_and_is_discarded_with_fresh(tmp_path: Path, content: bytes) -> None:
    corpus(tmp_path / "in")
    lay(tmp_path / "out", {"_run.json": content})
    with pytest.raises(JobError, match=r"_run\.json .* is damaged .* --fresh"):
        run_job(run_config(tmp_path), NoEngineBackend())
    run_job(run_config(tmp_path, fresh=True), EchoBackend())


def test_a_plan_with_fresh_does_not_look_at_the_run_that_it_would_discard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus(tmp_path / "in")
    lay(tmp_path / "out", {"_run.json": b"{"})
    with pytest.raises(JobError, match=r"_run\.json .* is damaged .* --fresh"):
        jobs.job_output.show_plan(run_config(tmp_path))
    jobs.job_output.show_plan(run_config(tmp_path, fresh=True))
    assert "figures: " in capsys.readouterr().out
    assert set(held(tmp_path / "out")) == {"_run.json", "_plan.json"}


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_was_killed_once_it_had_discarded_the_last_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    corpus(tmp_path / "in")
    run_job(run_config(tmp_path), EchoBackend())

    def dies(*of: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.run, "claim_output", dies)
        with pytest.raises(KeyboardInterrupt):
            run_job(run_config(tmp_path, fresh=True), EchoBackend())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"_commits", "_input", "data"}
    half = "0" * 32  # written when an earlier writer was killed
    lay(tmp_path / "out", {f"_commits/.00000-000000002.json.{half}": b"", f"_input/.0.json.{half}": b""})
    foreign = lay(tmp_path / "out", {"data/old/.keep": b""})
    with pytest.raises(JobError, match=r"did not write \('data/'\)"):
        run_job(run_config(tmp_path, fresh=fresh), NoEngineBackend())
    for path in foreign:
        path.unlink()
    run_job(run_config(tmp_path, fresh=fresh), EchoBackend())


def test_a_file_named_as_a_folder_of_ours_is_a_stranger(tmp_path: Path) -> None:
    lay(tmp_path / "out", {"data": b""})
    with pytest.raises(JobError, match=r"did not write \('data'\)"):
        check_place(Storage(str(tmp_path / "out")), Kind.RUN)


@pytest.mark.parametrize("content", [b"a file", b""])
@pytest.mark.parametrize("incremental", [False, True])
def test_an_output_that_is_a_file_is_refused(tmp_path: Path, content: bytes, incremental: bool) -> None:
    corpus(tmp_path / "in")
    laid = lay(tmp_path, {"out": content})
    with pytest.raises(JobError, match="is a file: name a directory"):
        run_job(run_config(tmp_path, incremental=incremental), NoEngineBackend())
    with pytest.raises(JobError, match="cannot be written"):
        claim_directory(tmp_path / "out", "a job")
    assert (tmp_path / "out").read_bytes() == laid[tmp_path / "out"]


def test_the_output_of_a_run_is_no_place_for_a_data_set_and_the_other_way_round(tmp_path: Path) -> None:
    corpus(tmp_path / "in")
    run_job(run_config(tmp_path), EchoBackend())
    generate_dataset(data_set_config(tmp_path, output=str(tmp_path / "set")), EchoBackend())
    before = held(tmp_path)
    with pytest.raises(JobError, match="did not write"):
        generate_dataset(data_set_config(tmp_path, fresh=True), NoEngineBackend())
    with pytest.raises(JobError, match="did not write"):
        run_job(run_config(tmp_path, output=str(tmp_path / "set"), fresh=True), NoEngineBackend())
    assert held(tmp_path) == before


FOREIGN_IN_OUTPUT = {
    "notes.txt": b"1", "data/notes.txt": b"2", "data/test-00000.parquet": b"3", "_failed/README.md": b"4",
    "_lease/notes.json": b"5", "report.html.bak": b"6", "data/old/train-00000.parquet": b"7", "_input/notes.json": b"8",
    "_requests/notes.parquet": b"9", "data/train-00000-of-00001.parquet": b"10", "_failed/notes.json.bak": b"11",
}  # fmt: skip


@pytest.mark.parametrize("incremental", [False, True])
def test_what_others_put_into_the_output_of_a_run_stays(tmp_path: Path, incremental: bool) -> None:
    corpus(tmp_path / "in")
    config = run_config(tmp_path, incremental=incremental)
    run_job(config, EchoBackend())
    foreign = lay(tmp_path / "out", FOREIGN_IN_OUTPUT)
    orphan = next((tmp_path / "out/data").glob("*-000000000-*.parquet"))
    stale = orphan.with_name(orphan.name[:-20] + "0" * 12 + ".parquet")
    shutil.copy(orphan, stale)
    (tmp_path / "out/_SUCCESS.json").unlink()
    run_job(config, EchoBackend())
    assert not stale.exists()
    pq.write_table(pa.table({"text": ["new"]}), tmp_path / "in/more.parquet")
    run_job(config.model_copy(update={"fresh": True}), EchoBackend(Echo("anew ")))
    assert {path: path.read_bytes() for path in foreign} == foreign


@pytest.mark.parametrize("fresh", [False, True])
def test_data_that_killed_writers_did_not_finish_goes_once_it_is_old_and_nothing_like_it(
    tmp_path: Path, fresh: bool
) -> None:
    corpus(tmp_path / "in")
    run_job(run_config(tmp_path), EchoBackend())
    unfinished = f".00000-000000000-{'0' * 12}.parquet"
    young = f"data/{unfinished}.{'1' * 32}"
    like_it = [
        f"data/{unfinished}",
        f"data/{unfinished}.{'2' * 31}",
        f"data/.notes.{'3' * 32}",
        f"data/a/{unfinished}.{'4' * 32}",
    ]
    old = f"data/{unfinished}.{'5' * 32}"
    lay(tmp_path / "out", dict.fromkeys([young, *like_it, old], b"half"))
    for name in (*like_it, old):
        os.utime(tmp_path / "out" / name, (1e9, 1e9))
    run_job(run_config(tmp_path, fresh=fresh), EchoBackend())
    after = held(tmp_path / "out")
    assert old not in after
    assert {young, *like_it} <= after.keys()


def test_what_others_put_into_a_data_set_stays_and_a_card_that_was_edited_too(tmp_path: Path) -> None:
    corpus(tmp_path / "in")
    config = data_set_config(tmp_path)
    assert len(generate_dataset(config, EchoBackend()).files) == 2
    foreign = lay(tmp_path / "out", FOREIGN_IN_OUTPUT)
    generate_dataset(config.model_copy(update={"rows_per_shard": 4}), EchoBackend())
    assert not (tmp_path / "out/data/train-00001.parquet").exists()  # of the longer list before
    assert not (tmp_path / "out/_README.md").exists()
    with (tmp_path / "out/README.md").open("a") as card:
        card.write("More about these rows.\n")
    foreign[tmp_path / "out/README.md"] = (tmp_path / "out/README.md").read_bytes()
    generate_dataset(config, EchoBackend())
    generate_dataset(config.model_copy(update={"fresh": True}), EchoBackend())
    assert DatasetCard.load(tmp_path / "out/_README.md").data.pretty_name == "out"
    assert {path: path.read_bytes() for path in foreign} == foreign


def test_requests_that_are_refused_or_planned_write_over_nobodys(tmp_path: Path) -> None:
    first = batch_config(tmp_path)
    generate_dataset(first, EchoBackend())
    before = held(tmp_path / "out")
    requests(tmp_path, "another")
    other = first.model_copy()
    with pytest.raises(JobError, match="differs in input"):
        generate_dataset(other, NoEngineBackend())
    generate(other.model_copy(update={"plan": True}))
    after = held(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    assert [name.split("/")[0] for name in after.keys() - before.keys()] == ["_requests"]


def test_requests_that_ask_for_what_cannot_be_given_leave_nothing(tmp_path: Path) -> None:
    config = batch_config(tmp_path)
    asked = json.loads((tmp_path / "requests.jsonl").read_text())
    asked["body"]["temperature"] = -1
    (tmp_path / "requests.jsonl").write_text(json.dumps(asked))
    with pytest.raises(JobError, match="the requests ask for temperature -1"):
        generation_config(config)
    asked["body"] |= {"temperature": 1, "max_tokens": 10}
    (tmp_path / "requests.jsonl").write_text(json.dumps(asked))
    said = "^what the requests ask for does not go with this job's options: .*min_new_tokens"
    with pytest.raises(JobError, match=said) as refused:
        generation_config(config.model_copy(update={"min_new_tokens": 20}))
    assert len(str(refused.value)) < 300
    assert not (tmp_path / "out").exists()


def test_a_plan_for_other_settings_is_shown_and_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus(tmp_path / "in")
    config = run_config(tmp_path)
    jobs.job_output.show_plan(config)
    run_job(config, EchoBackend())
    before = held(tmp_path / "out")
    jobs.job_output.show_plan(run_config(tmp_path, max_new_tokens=7))
    assert "not kept: the output belongs to run" in capsys.readouterr().out
    assert held(tmp_path / "out") == before


@pytest.mark.parametrize("kind", Kind)
def test_all_that_jobs_write_has_a_name_of_theirs(tmp_path: Path, kind: Kind) -> None:
    corpus(tmp_path / "in")
    (tmp_path / "in/broken.parquet").write_bytes(b"no Parquet")
    names: set[str] = set()
    if kind is Kind.RUN:
        for config in (run_config(tmp_path, incremental=True), run_config(tmp_path, output=str(tmp_path / "second"))):
            jobs.job_output.show_plan(config)
            with pytest.raises(UnitsFailed):
                run_job(config, EchoBackend())
            names |= set(held(Path(config.output)))
    else:
        (tmp_path / "in/broken.parquet").unlink()
        for config in (data_set_config(tmp_path), batch_config(tmp_path, output=str(tmp_path / "second"))):
            generate_dataset(config, EchoBackend())
            names |= {name for name in held(Path(config.output)) if not name.startswith("_generation/")}
    assert len(names) > 4
    assert set(own(kind, names)) == names


def test_no_other_name_is_removed(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "out"))
    for name in ("../victim", "data/notes.txt", "data/../../victim.parquet", "_failed/../x.json", "_run.json\n", ""):
        with pytest.raises(ValueError, match="is no name of ours"):
            remove(storage, Kind.RUN, [name])


# Whoever removes or replaces a file: by the names of the functions that do.
REMOVERS = {"unlink", "rmtree", "rmdir", "rm", "rm_file", "_rm_file", "removedirs", "delete"}
ALLOWED = {
    "pipeline/storage/ownership.py": {"storage.remove"},
    "pipeline/storage/storage.py": {"self.remove"},  # a probe of its own
    "pipeline/storage/stores.py": {
        "os.unlink",
        "os.replace",
        "fs._rm_file",
        "fs.rm_file",
    },  # likewise, and scratch files
    "engine/checkpoints/digests.py": {"os.replace"},  # kept digests, in the user's cache
    # A converted checkpoint, in the user's cache, and what of it a process that was killed has left under its own name.
    "engine/checkpoints/checkpoint.py": {"os.rename", "shutil.rmtree"},
    "engine/vllm/engine.py": {"os.rename"},  # a schedule, likewise
    "engine/adaptation/checkpoint.py": {"os.replace"},  # of its own unfinished file, in a claimed directory
    "engine/calibration/answer_file.py": {"os.replace"},  # likewise
    "pipeline/evaluation/study.py": {"scratch.replace"},  # likewise
}


def removals(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, name = ast.unparse(node.func.value).rpartition(".")[2], node.func.attr
        if name == "remove":
            removes = owner in ("os", "fs", "self", "_store") or owner.endswith("storage")
        elif name in ("replace", "rename"):  # of a text, or of a file
            removes = len(node.args) == 1 or owner == "os"
        else:
            removes = name in REMOVERS
        if removes:
            yield f"{owner}.{name}"


def test_nothing_else_in_the_project_removes_a_file() -> None:
    found: dict[str, set[str]] = {}
    for folder in ("engine", "pipeline", "jobs"):
        for file in (ROOT / folder).rglob("*.py"):
            if calls := set(removals(file)):
                found[str(file.relative_to(ROOT))] = calls
    assert found == ALLOWED


def test_a_shard_is_ours_however_many_there_are() -> None:
    assert all(Kind.DATA_SET.names.fullmatch(f"data/train-{number:05d}.parquet") for number in (0, 99_999, 100_000))


def test_a_directory_is_claimed_by_one_job_and_only_if_it_is_empty(tmp_path: Path) -> None:
    claim_directory(tmp_path / "a", "one.py")
    lay(tmp_path / "a", {"figures.json": b"1"})
    assert claim_directory(str(tmp_path / "a"), "one.py") == tmp_path / "a"
    with pytest.raises(JobError, match=r"was not written by two.py"):
        claim_directory(tmp_path / "a", "two.py")
    os.utime(tmp_path / "a" / CLAIM_FILE, (day := datetime(2020, 2, 29).timestamp(), day))
    assert claimed_at(claim_directory(tmp_path / "a", "one.py")) == datetime(2020, 2, 29)
    lay(tmp_path / "b", {".gitkeep": b""})
    claim_directory(tmp_path / "b", "one.py")
    lay(tmp_path / "c", NOTES)
    with pytest.raises(JobError, match=r"did not write \('notes.txt'\)"):
        claim_directory(tmp_path / "c", "one.py")
    lay(tmp_path / "full", {CLAIM_FILE: b""})  # as a disk leaves it that was full
    claim_directory(tmp_path / "full", "one.py")
    with pytest.raises(JobError, match=r"was not written by two.py"):
        claim_directory(tmp_path / "full", "two.py")
    lay(tmp_path / "linked", {".elsewhere": b""})
    (tmp_path / "linked" / CLAIM_FILE).symlink_to(tmp_path / "linked/.elsewhere")
    with pytest.raises(JobError, match=r"was not written by one.py"):
        claim_directory(tmp_path / "linked", "one.py")
    assert (tmp_path / "linked/.elsewhere").read_bytes() == b""
    lay(tmp_path / "strange", {CLAIM_FILE: b"", **NOTES})
    with pytest.raises(JobError, match=r"did not write \('notes.txt'\)"):
        claim_directory(tmp_path / "strange", "one.py")
    with pytest.raises(JobError, match="which the job reads"):
        claim_directory(tmp_path / "b", "one.py", sources=[tmp_path / "b/1.65x"])


@pytest.mark.parametrize("path", ["s3://bucket/schedules", "file:///schedules", Path("abfs://container/schedules")])
def test_a_url_is_no_directory_to_claim(path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=r"is a URL: one\.py writes to a local directory; name one, and copy it then"):
        claim_directory(path, "one.py")
    assert not held(tmp_path)


def test_a_name_that_no_file_can_have_is_no_directory_to_claim(tmp_path: Path) -> None:
    for name in ("a\0b", "a" * 300):
        with pytest.raises(JobError, match="cannot be written"):
            claim_directory(tmp_path / name, "one.py", ["in"], ["schedule"])


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("in", "in"), ("in", "in/out"), ("in", "in/a/b"), ("link", "in/out"), ("in/*", "in/out"), ("in", "link/out"),
        ("in/**/*.parquet", "in/out"), ("in/*/*.parquet", "in/out"), ("out/corpus.parquet", "out"),
        ("out/*.parquet", "out"), ("in/{a,out}", "in/out"),
    ],
)  # fmt: skip
def test_a_directory_that_overlaps_an_input_is_not_claimed(
    source: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus(tmp_path / "in")
    (tmp_path / "link").symlink_to("in")
    monkeypatch.chdir(tmp_path)
    before = held(tmp_path)
    for root in ("", f"{tmp_path}/", f"file://{tmp_path}/"):
        with pytest.raises(JobError, match="overlaps input"):
            claim_directory(output, "one.py", [root + source])
    assert held(tmp_path) == before


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("in", "out"), ("in", "in-2"), ("in", "in/_out"), ("in", "in/.out"), ("in/*.parquet", "in/out"),
        ("in/corpus.parquet", "in/out"), ("s3://bucket/in", "in"),
    ],
)  # fmt: skip
def test_a_directory_beside_an_input_is_claimed(
    source: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    claim_directory(output, "one.py", [source])
    assert list(held(tmp_path)) == [f"{output}/_job.json"]


CLAIMS = """
import sys
from pipeline.errors import JobError
from pipeline.storage.ownership import claim_directory
try:
    claim_directory(sys.argv[1], "one.py")
except JobError as error:
    sys.exit(str(error))
"""


def test_two_processes_do_not_work_in_one_directory(tmp_path: Path) -> None:
    def claimed_elsewhere() -> str:
        program = [sys.executable, "-c", CLAIMS, str(tmp_path / "link/a")]
        return subprocess.run(program, cwd=ROOT, capture_output=True, text=True).stderr

    (tmp_path / "link").symlink_to(".")
    assert claimed_elsewhere() == ""
    claim_directory(tmp_path / "a", "one.py")
    claim_directory(tmp_path / "link/a", "one.py")
    assert "another process is at work on output" in claimed_elsewhere()
    shutil.rmtree(tmp_path / "a")
    claim_directory(tmp_path / "a", "one.py")  # another directory of that name
    assert "another process is at work on output" in claimed_elsewhere()


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_a_directory_on_a_disk_without_locks_is_claimed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*of: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pipeline.storage.ownership.fcntl.flock", unsupported)
    claim_directory(tmp_path / "a", "one.py")


# Everything below: whatever lies around, whatever a job is told, foreign files come through.


def _model(folder: Path) -> str:
    (folder / "model").mkdir(exist_ok=True)  # an empty one: a job that gets so far has claimed its output and ends
    return str(folder / "model")


def _local_job(config_class: Callable[..., Any], job: Callable[[Any], object], **options: Any) -> Callable[..., object]:
    def start(folder: Path, flags: Mapping[str, bool], output: str) -> object:
        source = {"input": str(folder / "in/corpus.parquet")}
        return job(config_class(**source, output=str(folder / output), model=_model(folder), **options))

    return start


def _run(folder: Path, flags: Mapping[str, bool], output: str) -> object:
    config = run_config(folder, output=str(folder / output), **flags)
    return jobs.job_output.show_plan(config) if config.plan else run_job(config, EchoBackend())


def _data_set(make: Callable[..., DatasetConfig], folder: Path, flags: Mapping[str, bool], output: str) -> object:
    if make is batch_config:
        flags = {**flags, "incremental": False}
    config = make(folder, output=str(folder / output), **flags)
    return generate(config) if config.plan else generate_dataset(config, EchoBackend())


JOBS: dict[str, Callable[[Path, Mapping[str, bool], str], object]] = {
    "summarize_corpus": _run,
    "generate_dataset": partial(_data_set, data_set_config),
    "generate_dataset of requests": partial(_data_set, batch_config),
    "calibrate_schedule": _local_job(CalibrateSchedule, calibrate),
    "adapt_model": _local_job(AdaptModel, adapt, schedule="infra/demo/calibrated"),
    "evaluate_schedule": _local_job(EvaluateSchedule, evaluate, rivals=["all"]),
    "benchmarks.job": _local_job(lambda input, **given: BenchmarkJob(input=[input], **given), benchmark),
}
WITHOUT_A_MODEL = ("summarize_corpus", "generate_dataset", "generate_dataset of requests")
# Data sets, other runs, notes; some named almost as we name things.
FOREIGN = (
    *FOREIGN_IN_OUTPUT, "README.md", "dataset_infos.json", ".gitkeep", ".git/config", "_SUCCESS", "run.json", "1.25x/a",
    "earlier/_run.json", "earlier/_commits/00000-000000000.json", "earlier/data/00000-000000000-0123456789ab.parquet",
    "earlier/_SUCCESS.json", "earlier/report.html", "sets/_DATASET.json", "sets/data/train-00000.parquet",
    "sets/README.md", "work/notes.txt", "data/00000-000000000.parquet", "data/validation-00000.parquet", "a.parquet",
    "_commits/notes.json", "_run.json.bak", "_DATASET.json.bak", "output.jsonl.gz", "curve.json.orig", "engine.png",
)  # fmt: skip
PLACES = ("out", "", "in", "out/out", "out/_generation")
trees = st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(FOREIGN), st.binary(max_size=9)), max_size=5)
flags = st.fixed_dictionaries({name: st.booleans() for name in ("fresh", "incremental", "plan")})
started = st.sampled_from((*JOBS, *WITHOUT_A_MODEL))  # of those that get further, more
steps = st.lists(st.tuples(started, flags, st.sampled_from(("out", "out", "out", "in", ""))), min_size=1, max_size=3)


def test_foreign_files_come_through_whatever_jobs_are_started(tmp_path_factory: pytest.TempPathFactory) -> None:
    done: Counter[str] = Counter()

    @settings(max_examples=TREES, phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(first=st.just([]) | trees, story=steps, late=st.lists(trees, min_size=3, max_size=3))
    def check(
        first: list[tuple[str, str, bytes]],
        story: list[tuple[str, dict[str, bool], str]],
        late: list[list[tuple[str, str, bytes]]],
    ) -> None:
        folder = tmp_path_factory.mktemp("trees")
        corpus(folder / "in")
        foreign = {path: path.read_bytes() for path in (folder / "in").iterdir()}
        foreign |= _lay(folder, first)
        for (job, given_flags, output), more in zip(story, late, strict=False):
            with suppress(*ENDS):
                JOBS[job](folder, given_flags, output)
                done[job] += not given_flags["plan"]
            assert {path: path.read_bytes() if path.is_file() else None for path in foreign} == foreign, job
            foreign |= _lay(folder, more)
        shutil.rmtree(folder)

    check()
    assert done["summarize_corpus"] > 0, "jobs that are refused touch nothing anyway"


def _lay(folder: Path, tree: list[tuple[str, str, bytes]]) -> dict[Path, bytes]:
    laid: dict[Path, bytes] = {}
    for place, name, content in tree:
        laid |= lay(folder / place, {name: content})
    return laid


CALIBRATE = {"max_new_tokens": 12, "min_new_tokens": 6, "target_speedups": [1.2], "prompts": 24}
EVALUATE = {"max_new_tokens": 6, "rivals": ["early-termination"], "target_speedups": [1.2], "rows": 4}


@pytest.mark.parametrize(
    ("config_class", "job", "options", "other"),
    [
        (CalibrateSchedule, calibrate, CALIBRATE, {"seed": 1}),
        (EvaluateSchedule, evaluate, EVALUATE | {"calibration_rows": 2}, {"rows": 5}),
    ],
    ids=["calibrate_schedule", "evaluate_schedule"],
)
def test_foreign_files_beside_all_that_a_job_with_a_model_writes_come_through(
    config_class: Callable[..., Any],
    job: Callable[[Any], object],
    options: dict[str, Any],
    other: dict[str, Any],
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Laid between two calls, of which the second writes over what the first wrote."""
    model, rows = str(make_checkpoint(vocab_size=260, eos=259)), [f"{row * row} text {row}" for row in range(30)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "corpus.parquet")
    source = {"input": str(tmp_path / "corpus.parquet"), "prompt": "{text}", "prompt_format": "raw", "part": "all"}
    config = config_class(**source, output=str(tmp_path / "out"), model=model, device="cpu", **options)
    job(config)
    ours = held(tmp_path / "out")
    assert len(ours) > 3
    foreign = lay(tmp_path / "out", {f"{name}.bak": b"mine" for name in ours})
    foreign |= lay(tmp_path / "out", {str(Path(name).with_name("notes.txt")): b"mine" for name in ours})
    job(config.model_copy(update=other))
    again = held(tmp_path / "out")
    assert {name for name in ours if again[name] != ours[name]}
    assert {path: path.read_bytes() for path in foreign} == foreign


def test_a_lease_is_not_written_where_no_run_may_be(tmp_path: Path) -> None:
    corpus(tmp_path / "in")
    lay(tmp_path / "out", NOTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "__enter__", lambda self: pytest.fail("the lease was taken"))
        with pytest.raises(JobError, match="did not write"):
            run_job(run_config(tmp_path, incremental=True), NoEngineBackend())
