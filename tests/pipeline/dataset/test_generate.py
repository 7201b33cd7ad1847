"""Data sets from their input to what `datasets` loads."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from engine_double import Echo, EchoBackend, NoEngineBackend
from fixture_types import WriteParquet
from inline_session import InlineSession
from openai.types.chat import ChatCompletion
from pydantic import ValidationError

from jobs import inspect_run
from pipeline.commits.commit import read_commits
from pipeline.dataset import generate
from pipeline.dataset.config import GENERATION, DatasetConfig
from pipeline.dataset.generate import MANIFEST, generate_dataset, generation_config, unpublished
from pipeline.errors import JobError, JobStopped, NothingToDo, UnitsFailed
from pipeline.inspection import inspect, verify
from pipeline.preparing.preparation import prepare_run
from pipeline.preparing.run_record import claim_output
from pipeline.rows.unit import WorkUnit
from pipeline.storage.lease import Lease
from pipeline.storage.storage import Storage

Config = Callable[..., DatasetConfig]
TEXTS = [f"text {number:02d} {'x' * number}" for number in range(12)] + ["TEXT 03 xxx"]


@pytest.fixture
def config(tmp_path: Path, write_parquet: WriteParquet) -> Config:
    write_parquet(tmp_path / "in/0.parquet", {"id": range(len(TEXTS)), "text": TEXTS}, [5, 8])

    def make(**options: Any) -> DatasetConfig:
        defaults = {
            "input": str(tmp_path / "in"), "output": str(tmp_path / "set"), "prompt_format": "raw", "id_column": "id",
            "max_new_tokens": 15, "temperature": 0.7, "rows_per_unit": 4, "replicas": 1,
        }  # fmt: skip
        return DatasetConfig(**{**defaults, **options})

    return make


@pytest.mark.usefixtures("cluster")
def test_samples_are_filtered_sharded_and_loaded_with_their_card(config: Config, tmp_path: Path) -> None:
    given = config(
        samples_per_prompt=2, finish_reasons=["stop"], rows_per_shard=4, dataset_name="Echoes", dataset_license="mit"
    )
    result = generate_dataset(given, EchoBackend())

    # Echo's answer is the prompt's first 15 bytes, whole for the first 8 texts and for the copy of text 3.
    assert result.run.totals.rows == 2 * len(TEXTS)
    assert result.dropped == {"finish_reason": 8, "duplicate": 10}
    run = Storage(f"{given.output}/{GENERATION}")
    commits = read_commits(run)
    assert [(commit.start, commit.totals.rows) for commit in commits] == [*((n, 4) for n in range(0, 12, 2)), (12, 2)]
    assert result.run.totals.flops_prompt == 100 * sum(map(len, TEXTS)), "both samples of a prompt share its cost"
    assert verify(run, inspect(run)) == []
    held = json.loads((run.read("_SUCCESS.json") or b"").decode())["input"]
    assert (held["files"], held["rows"]) == (1, len(TEXTS))

    loaded = datasets.load_dataset(given.output, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["generation"] == TEXTS[:8]
    assert loaded["id"] == list(range(8))
    assert set(loaded["sample"]) == {0}
    assert len(list((tmp_path / "set/data").iterdir())) == 2

    _, front, body = (tmp_path / "set/README.md").read_text().split("---\n", 2)
    card = yaml.safe_load(front)
    assert (card["pretty_name"], card["license"], card["size_categories"]) == ("Echoes", "mit", ["n<1K"])
    assert "| duplicate | 10 |" in body

    success = json.loads((run.read("_SUCCESS.json") or b"").decode())
    assert unpublished(Storage(given.output), success) == ""
    assert "of an earlier state of the run" in unpublished(Storage(given.output), {**success, "commits": []})
    shard = tmp_path / "set/data/train-00001.parquet"
    moved = shard.rename(tmp_path / "moved.parquet")
    assert "data/train-00001.parquet is not there" in unpublished(Storage(given.output), success)
    moved.rename(shard)

    # The same again touches nothing and needs no engine; other filters need none either.
    before = (tmp_path / "set/README.md").stat().st_mtime_ns
    again = generate_dataset(given, NoEngineBackend())
    assert (again.kept, again.dropped) == (8, result.dropped)
    assert (tmp_path / "set/README.md").stat().st_mtime_ns == before
    wider = generate_dataset(given.model_copy(update={"duplicates": "keep", "rows_per_shard": 50}), NoEngineBackend())
    assert wider.kept == 18
    assert wider.files == ["data/train-00000.parquet"]
    assert [file.name for file in (tmp_path / "set/data").iterdir()] == ["train-00000.parquet"]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_batch_of_requests_is_answered_request_by_request(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100, "n": 2}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body} for name in ("b", "a", "c")
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = DatasetConfig(
        input=str(requests), output=str(tmp_path / "set"), input_format="openai-batch", output_format="openai-batch",
        replicas=1,
    )  # fmt: skip
    result = generate_dataset(given, EchoBackend(Echo("said ")))

    answers = [json.loads(line) for line in (tmp_path / "set/output.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["b", "a", "c"]
    completion = ChatCompletion.model_validate(answers[0]["response"]["body"], strict=True)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.choices[0].message.content == "said \x01user: hello\x02"
    assert (tmp_path / "set/errors.jsonl").read_text() == ""
    assert result.files == ["output.jsonl", "errors.jsonl"]
    rows = generate_dataset(given.model_copy(update={"output_format": "parquet"}), NoEngineBackend())
    assert rows.files == ["data/train-00000.parquet"]
    assert not list((tmp_path / "set").glob("*.jsonl"))
    assert generate_dataset(given, NoEngineBackend()).files == result.files
    assert not list((tmp_path / "set/data").glob("*"))


def test_a_run_whose_units_had_one_sample_each_is_not_gone_on_with(config: Config) -> None:
    given = config(samples_per_prompt=2)
    run = generation_config(given)
    description = prepare_run(run, NoEngineBackend()).description
    claim_output(run.output_storage(), {name: part for name, part in description.items() if name != "units"})
    with pytest.raises(
        JobError, match=r'units null -> "rows with all their samples"; .* finish it with the earlier version'
    ):
        generate_dataset(given, NoEngineBackend())
    assert inspect(run.output_storage()).advice.startswith("start the same job again with the earlier version")
    with pytest.raises(JobError, match="finish it with the earlier version"):  # another seed alone is no way back
        generate_dataset(given.model_copy(update={"seed": 1}), NoEngineBackend())
    run.output_storage().write("_SUCCESS.json", b"{}")
    with pytest.raises(JobError, match="publish it with the earlier version"):
        generate_dataset(given, NoEngineBackend())


def test_all_samples_of_rows_that_failed_are_missing(
    config: Config, inline: type[InlineSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin_unit(_session: InlineSession, unit: WorkUnit) -> None:
        if unit.start == 2:
            raise JobError("no")

    monkeypatch.setattr(inline, "begin_unit", begin_unit)
    given = config(samples_per_prompt=2)
    with pytest.raises(UnitsFailed, match=r"^6 of 7 units \(22 rows\) failed, .* rows 2 to 3 of"):
        generate_dataset(given, EchoBackend())
    report = " ".join(Path(given.output, GENERATION, "report.html").read_text().split())
    assert "4 rows, and not complete: 22 rows in 6 units failed." in report


def test_an_incremental_data_set_grows_with_its_input(
    config: Config, tmp_path: Path, write_parquet: WriteParquet, inline: type[InlineSession],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given = config(incremental=True, samples_per_prompt=2, duplicates="keep", max_new_tokens=50)
    assert generate_dataset(given, EchoBackend()).kept == 2 * len(TEXTS)
    units = inline.units_done
    write_parquet(tmp_path / "in/1.parquet", {"id": [100, 101], "text": ["new 0", "new 1"]})
    grown = generate_dataset(given, EchoBackend())
    assert (grown.kept, grown.run.rows_resumed) == (2 * (len(TEXTS) + 2), 2 * len(TEXTS))
    success = json.loads(Path(given.output, GENERATION, "_SUCCESS.json").read_text())
    assert success["input"]["rows"] == len(TEXTS) + 2
    assert inline.units_done == units + 1
    assert verify(Storage(f"{given.output}/{GENERATION}"), inspect(Storage(f"{given.output}/{GENERATION}"))) == []

    loaded = datasets.load_dataset(given.output, split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(loaded["generation"]) == sorted(2 * [*TEXTS, "new 0", "new 1"])
    before = (tmp_path / "set/README.md").stat().st_mtime_ns
    assert generate_dataset(given, NoEngineBackend()).kept == 2 * (len(TEXTS) + 2)
    assert (tmp_path / "set/README.md").stat().st_mtime_ns == before
    monkeypatch.setattr("pipeline.storage.lease.RENEW_S", 0.1)
    monkeypatch.setattr("pipeline.storage.lease.LOOK_S", 0.1)
    with Lease(Storage(f"{given.output}/{GENERATION}")), pytest.raises(NothingToDo):
        generate_dataset(given, NoEngineBackend())


@pytest.mark.usefixtures("inline")
def test_a_data_set_that_another_job_has_taken_over_is_left_to_it(
    config: Config, tmp_path: Path, write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own is paused for longer than the lease lasts, with the rows that it publishes in hand."""
    given = config(incremental=True, rows_per_shard=2, max_new_tokens=50)
    files = generate_dataset(given, EchoBackend()).files
    before = {name: (tmp_path / "set" / name).read_bytes() for name in files}
    write_parquet(tmp_path / "in/1.parquet", {"id": [100], "text": ["new"]})
    committed, lost = generate._committed, []

    def taken_over(*given: Any) -> Any:
        lost.append(True)
        return committed(*given)

    def check(_: Lease) -> None:
        if lost:
            raise JobStopped("another job has taken over")

    monkeypatch.setattr(generate, "_committed", taken_over)
    monkeypatch.setattr(Lease, "check", check)
    with pytest.raises(JobStopped, match="another job has taken over"):
        generate_dataset(given, EchoBackend(Echo(prefix="new ")))
    assert {name: (tmp_path / "set" / name).read_bytes() for name in files} == before
    assert not (tmp_path / "set/_DATASET.json").exists()


@pytest.mark.usefixtures("inline")
def test_shards_have_the_columns_of_an_output_and_the_sample_but_those_that_are_alike_in_all_rows(
    config: Config,
) -> None:
    (shard,) = generate_dataset(config(), EchoBackend()).files
    assert pq.read_schema(Path(config().output, shard)).names == [
        "id", "sample", "generation", "finish_reason", "prompt_tokens", "prompt_truncated", "generated_tokens",
        "flops_prompt", "flops_decode", "flops_decode_full_depth", "flops_full_depth", "mean_active_layers",
    ]  # fmt: skip


def test_requests_are_not_done_incrementally() -> None:
    with pytest.raises(ValidationError, match="incremental looks for new Parquet files"):
        DatasetConfig(input="in.jsonl", output="out", input_format="openai-batch", incremental=True)


@pytest.mark.usefixtures("inline")
def test_a_data_set_of_which_every_row_was_dropped_is_warned_of_at_each_start(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    given = config(finish_reasons=["stop"], require_pattern="no such text")  # 5 of the 13 end at their length
    for backend in (EchoBackend(), NoEngineBackend()):
        caplog.clear()
        assert generate_dataset(given, backend).kept == 0
        (said,) = (record.message for record in caplog.records if record.levelname == "WARNING")
        assert said.startswith(f"all 13 rows of '{given.output}' were dropped, most of them (9) under pattern: look")


@pytest.mark.usefixtures("inline")
def test_another_title_or_licence_makes_another_card(config: Config, tmp_path: Path) -> None:
    generate_dataset(config(), EchoBackend())
    for options in ({"dataset_name": "Echoes"}, {"dataset_name": "Echoes", "dataset_license": "mit"}):
        generate_dataset(config(**options), NoEngineBackend())
        front = yaml.safe_load((tmp_path / "set/README.md").read_text().split("---\n")[1])
        assert (front["pretty_name"], front.get("license")) == ("Echoes", options.get("dataset_license"))


@pytest.mark.usefixtures("inline")
def test_shards_whose_writers_died_are_swept_and_strangers_are_not(config: Config, tmp_path: Path) -> None:
    generate_dataset(config(), EchoBackend())
    data = tmp_path / "set/data"
    names = [f".train-00000.parquet.{'0' * 32}", ".train-00000.parquet.swp", f".train-00001.parquet.{'1' * 32}"]
    for name in names:
        (data / name).write_bytes(b"half")
    for name in names[:2]:
        os.utime(data / name, (0, 0))
    generate_dataset(config(dataset_name="Echoes"), NoEngineBackend())
    assert [name for name in names if (data / name).exists()] == names[1:]  # one may still be written


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("lost", ["README.md", "data/train-00001.parquet"])
def test_what_was_lost_of_a_data_set_is_published_again(config: Config, tmp_path: Path, lost: str) -> None:
    given = config(rows_per_shard=6)
    files = generate_dataset(given, EchoBackend()).files
    before = (tmp_path / "set" / lost).read_bytes()
    (tmp_path / "set" / lost).unlink()
    assert generate_dataset(given, NoEngineBackend()).files == files
    assert (tmp_path / "set" / lost).read_bytes() == before


@pytest.mark.usefixtures("cluster")
def test_wide_rows_fill_a_shard_sooner_and_a_shard_that_was_changed_is_named(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "SHARD_BYTES", 1)
    given = config(duplicates="keep")
    generate_dataset(given, EchoBackend())
    manifest = json.loads(Path(given.output, MANIFEST).read_text())
    assert [entry["rows"] for entry in manifest["files"]] == [4, 4, 4, 1]
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", given.output, "--verify"])
    assert inspect_run.main() == 0
    changed = Path(given.output, manifest["files"][1]["file"])
    changed.write_bytes(changed.read_bytes()[:-1])
    assert inspect_run.main() == 1
    said, failed = (" ".join(part.split()) for part in capsys.readouterr())
    assert f"damaged: {manifest['files'][1]['file']} is not what was published" in said
    assert f"error: the data set '{given.output}' has 1 damaged file: remove what is damaged, and" in failed
    assert "start the same job again, which generates nothing anew" in failed
    changed.unlink()
    generate_dataset(given, NoEngineBackend())
    assert inspect_run.main() == 0


def test_an_input_column_named_sample_is_refused_before_the_run(
    config: Config, tmp_path: Path, write_parquet: WriteParquet
) -> None:
    write_parquet(tmp_path / "in/0.parquet", {"id": [1], "text": ["one"], "sample": [7]})
    with pytest.raises(JobError, match="input column 'sample' has a name that the job needs: leave it out with keep_"):
        generate_dataset(config(id_column=None), NoEngineBackend())


@pytest.mark.usefixtures("inline")
def test_a_data_set_is_made_afresh_though_the_first_try_died_once_it_had_discarded_the_old_one(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = generate_dataset(config(), EchoBackend()).files

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pipeline.run.claim_output", killed)
        with pytest.raises(KeyboardInterrupt):
            generate_dataset(config(fresh=True), EchoBackend())
    assert generate_dataset(config(fresh=True), EchoBackend(Echo(prefix="new "))).files == files
    rows = pq.read_table(Path(config().output, files[0]))["generation"].to_pylist()
    assert rows
    assert all(row.startswith("new ") for row in rows)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("incremental", [True, False])
def test_an_input_that_takes_in_its_own_shards_is_refused_at_once(
    config: Config, tmp_path: Path, write_parquet: WriteParquet, incremental: bool
) -> None:
    """By a glob of names that shards have; or through a link, as soon as it is there."""
    write_parquet(tmp_path / "sets/a/data/train-00000.parquet", {"id": [1], "text": ["other"]})
    given = config(input=str(tmp_path / "sets/*/data/train-*.parquet"), output=str(tmp_path / "sets/b"))
    with pytest.raises(JobError, match="overlaps input"):
        generate_dataset(given.model_copy(update={"incremental": incremental}), NoEngineBackend())
    assert not (tmp_path / "sets/b").exists()

    given = config(incremental=incremental, text_column="generation", keep_columns=[])
    write_parquet(tmp_path / "in/0.parquet", {"id": [1], "generation": ["text"]})
    generate_dataset(given, EchoBackend())
    (tmp_path / "in/more").symlink_to(tmp_path / "set/data")
    with pytest.raises(
        JobError, match=r"set/data/train-00000.parquet' lies in output|in/more/train-00000.parquet' lie"
    ):
        generate_dataset(given, NoEngineBackend())


@pytest.mark.usefixtures("inline")
def test_what_was_not_published_is_though_the_input_is_gone(config: Config, tmp_path: Path) -> None:
    """As when each night's files are archived behind a job, and it is told of another filter or died."""
    given = config(incremental=True)
    generate_dataset(given, EchoBackend())
    (tmp_path / "set" / MANIFEST).unlink()
    (tmp_path / "in/0.parquet").unlink()
    for filters, kept in (({}, 12), ({"finish_reasons": ["stop"]}, 8)):
        with pytest.raises(NothingToDo, match="holds no files any more"):
            generate_dataset(given.model_copy(update=filters), NoEngineBackend())
        assert json.loads((tmp_path / "set" / MANIFEST).read_text())["rows"] == kept
        assert pq.read_table(tmp_path / "set/data").num_rows == kept


@pytest.mark.usefixtures("inline")
def test_a_data_set_whose_rows_all_went_is_published_empty(
    config: Config, tmp_path: Path, write_parquet: WriteParquet
) -> None:
    given, none = config(incremental=True), {"id": pa.array([], pa.int64()), "text": pa.array([], pa.string())}
    before = pq.read_schema(tmp_path / "set" / generate_dataset(given, EchoBackend()).files[0])
    write_parquet(tmp_path / "in/0.parquet", none)
    for spelt in (f"{given.input}/", given.input):
        assert generate_dataset(given.model_copy(update={"input": spelt}), NoEngineBackend()).kept == 0
        assert pq.read_table(tmp_path / "set/data").num_rows == 0
    assert pq.read_schema(tmp_path / "set/data/train-00000.parquet").equals(before)
    assert "0 rows generated by" in (tmp_path / "set/README.md").read_text()
    with pytest.raises(JobError, match="has no rows: there is no data set to make"):
        generate_dataset(config(output=str(tmp_path / "other")), NoEngineBackend())


@pytest.mark.usefixtures("inline")
def test_what_is_published_is_mended_and_files_of_others_beside_it_stay(config: Config, tmp_path: Path) -> None:
    given = config()
    generate_dataset(given, EchoBackend())
    others = [tmp_path / "set" / name for name in ("output.jsonl", "errors.jsonl", "notes.txt")]
    for path in others:
        path.write_text("mine\n")
    (shard,) = (tmp_path / "set/data").iterdir()
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    generate_dataset(given, NoEngineBackend())
    assert shard.read_bytes() == whole
    generate_dataset(given.model_copy(update={"fresh": True}), EchoBackend())
    (tmp_path / "set/_DATASET.json").unlink()
    generate_dataset(given, NoEngineBackend())
    generate_dataset(given.model_copy(update={"min_chars": 9}), NoEngineBackend())
    assert [path.read_text() for path in others] == ["mine\n"] * 3

    card = tmp_path / "set/README.md"
    card.write_text("my own")
    generate_dataset(given, NoEngineBackend())
    assert card.read_text() == "my own"
    assert (tmp_path / "set/_README.md").exists()
    card.unlink()
    generate_dataset(given, NoEngineBackend())
    assert card.exists()
    assert not (tmp_path / "set/_README.md").exists(), "of the two cards one would be of an earlier state"


@pytest.mark.usefixtures("inline")
def test_lost_answers_to_requests_are_seen_and_mended_and_other_requests_are_said_to_be_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(count: int) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        lines = [
            {"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(count)
        ]
        (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    ask(2)
    given = DatasetConfig(
        input=str(tmp_path / "requests.jsonl"), output=str(tmp_path / "set"), input_format="openai-batch",
        output_format="openai-batch", max_new_tokens=50, replicas=1,
    )  # fmt: skip
    generate_dataset(given, EchoBackend())
    answers = tmp_path / "set/output.jsonl"
    whole = answers.read_text()
    answers.write_text("")
    with pytest.raises(JobError, match="1 damaged file"):
        inspect_run.look(inspect_run.InspectRun(output=given.output, verify=True))
    assert "damaged: output.jsonl is not what was published" in capsys.readouterr().out
    generate_dataset(given, NoEngineBackend())
    assert [json.loads(line)["response"]["body"]["choices"] for line in answers.read_text().splitlines()] == [
        json.loads(line)["response"]["body"]["choices"] for line in whole.splitlines()
    ]

    generate_dataset(given.model_copy(update={"output_format": "parquet"}), NoEngineBackend())
    assert not answers.exists()
    generate_dataset(given, NoEngineBackend())
    assert not (tmp_path / "set/README.md").exists(), "there are no shards that it could tell of"

    (kept,) = (tmp_path / "set/_requests").iterdir()
    ask(3)
    with pytest.raises(JobError, match=r"differs in input: .* holds other requests"):
        generate_dataset(given, NoEngineBackend())
    assert list((tmp_path / "set/_requests").iterdir()) == [kept], "what is refused writes nothing"
    assert generate_dataset(given.model_copy(update={"fresh": True}), EchoBackend()).kept == 3
    (now,) = (tmp_path / "set/_requests").iterdir()
    assert now != kept
