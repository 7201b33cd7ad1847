"""A configuration as a command line: flags, a YAML file, and a message for every mistake."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from engine import ModelError, PromptError, ScheduleError
from jobs import command_line
from jobs.adaptation import AdaptModel
from jobs.benchmarks.job import BenchmarkJob
from jobs.benchmarks.pipeline import BenchmarkPipeline
from jobs.benchmarks.shapes import WriteShape
from jobs.calibrate_schedule import CalibrateSchedule
from jobs.evaluate_schedule import EvaluateSchedule
from jobs.inspect_run import InspectRun
from jobs.summarize_corpus import SummarizeCorpus
from pipeline.dataset.config import DatasetConfig
from pipeline.errors import JobError, NothingToDo, UnitsFailed
from pipeline.storage.storage import StorageGone

# A value other than the default for every option.
VALUES: dict[str, Any] = {
    "input": "in/",
    "output": "out/",
    "text_column": "body",
    "log_format": "json",
    "id_column": "key",
    "keep_columns": ["key", "title"],
    "limit": 7,
    "system": "Be brief.",
    "prompt": "Say {{in brief}}: {text}",
    "prompt_format": "raw",
    "max_prompt_tokens": 100,
    "overlong": "reject",
    "parse_control_tokens": True,
    "model": "some/model",
    "device": "cuda",
    "dtype": "bfloat16",
    "target_speedup": 1.25,
    "schedule": "schedule.json",
    "engine": "vllm",
    "gpu_memory_share": 0.8,
    "quantization": "fp8",
    "cache_dtype": "fp8",
    "max_new_tokens": 9,
    "min_new_tokens": 2,
    "temperature": 0.5,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "stop": ["END", "\n\n"],
    "seed": 3,
    "batch_size": 5,
    "rows_per_unit": 11,
    "replicas": 2,
    "gpus_per_replica": 0.5,
    "threads_per_replica": 4,
    "ray_address": "local",
    "fresh": True,
    "min_replicas": 2,
    "unit_attempts": 5,
    "stall_minutes": 2.5,
    "stop_grace_s": 3.0,
    "storage_patience_s": 60.0,
    "s3_endpoint": "https://s3.example.org",
    "s3_region": "eu-west-1",
    "s3_profile": "batch",
    "s3_path_style": True,
    "s3_anonymous_input": True,
    "s3_connect_timeout_s": 4.0,
    "s3_read_timeout_s": 5.0,
    "audit_fraction": 0.01,
    "min_audit_rouge": 0.8,
    "incremental": True,
    "max_flops": 1e18,
    "max_gpu_hours": 12.5,
    "plan": True,
    "plan_rows": 50,
    "plan_prompts": 4,
    "plan_output_tokens": 25,
    "price_per_gpu_hour": 2.5,
}
NEEDED = {"min_audit_rouge": {"audit_fraction": 0.01}}  # options that go with another
REQUIRED = ["--input", "in/", "--output", "out/"]


def parse(*arguments: str) -> SummarizeCorpus:
    return command_line.parse(SummarizeCorpus, "summarize_corpus.py", arguments)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command line says before it exits with code 2."""
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_value_stands_here_for_every_option() -> None:
    assert set(VALUES) == set(SummarizeCorpus.model_fields)


@pytest.mark.parametrize("name", VALUES)
def test_every_option_has_a_kebab_case_flag(name: str) -> None:
    value = VALUES[name]
    given = value if isinstance(value, list) else [] if value is True else [value]
    needed = NEEDED.get(name, {})
    others = [part for other, content in needed.items() for part in (flag(other), str(content))]
    config = parse(*REQUIRED, *others, flag(name), *map(str, given))
    assert config == SummarizeCorpus(input="in/", output="out/").model_copy(update={name: value, **needed})


def test_a_list_may_be_given_in_parts_and_its_strings_are_left_as_they_are() -> None:
    stops = ["\n\n", "[/INST]", "a, b", '"', "null", " x "]
    assert parse(*REQUIRED, "--stop", *stops[:3], "--stop", *stops[3:]).stop == stops
    assert parse(*REQUIRED, "--keep-columns").keep_columns == []


@pytest.mark.parametrize("name", VALUES)
def test_every_option_is_a_key_of_the_config_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / "job.yaml"
    # JSON is YAML.
    content = SummarizeCorpus(input="in/", output="out/").model_copy(
        update={name: VALUES[name], **NEEDED.get(name, {})}
    )
    file.write_text(content.model_dump_json())
    assert parse("--config", str(file)) == content


def test_keys_of_the_config_file_may_be_spelt_as_flags_are(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: in/\noutput: out/\ntext-column: body\nmax_new_tokens: 5\n")
    config = parse("--config", str(file))
    assert (config.text_column, config.max_new_tokens) == ("body", 5)


def test_a_list_of_one_in_the_config_file_is_a_list_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: in/\noutput: out/\nkeep_columns: id\n")
    said = mistake(capsys, "--config", str(file))
    assert "--keep-columns Input should be a valid list, got 'id': a list is written [a, b] in YAML\n" in said


def test_a_key_given_in_both_spellings_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: in/\noutput: out/\ntext-column: body\ntext_column: text\n")
    assert "it gives text_column twice" in mistake(capsys, "--config", str(file))


def test_flags_win_over_the_config_file_and_the_rest_of_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: in/\noutput: out/\nmax_new_tokens: 5\nstop: [a, b]\nseed: 4\n")
    config = parse("--max-new-tokens", "6", "--stop", "c", f"--config={file}")
    assert (config.max_new_tokens, config.stop, config.seed) == (6, ["c"], 4)


@pytest.mark.parametrize("name", [name for name, value in VALUES.items() if value is True])
def test_a_switch_that_the_config_file_turns_on_is_turned_off_by_its_no_flag(tmp_path: Path, name: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"input: in/\noutput: out/\n{name}: true\n")
    assert getattr(parse("--config", str(file)), name) is True
    assert getattr(parse("--config", str(file), flag(f"no_{name}")), name) is False


def test_environment_variables_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "model", "SEED", "OUTPUT", "CONFIG", "STOP"):
        monkeypatch.setenv(name, "77")
    assert parse(*REQUIRED) == SummarizeCorpus(input="in/", output="out/")


def test_a_missing_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = mistake(capsys, "--output", "out/")
    assert "error: --input is required" in said
    assert "try summarize_corpus.py --help" in said


def test_every_mistake_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = mistake(capsys, "--output", "out/", "--limit", "0", "--overlong", "drop")
    for culprit in ("--input", "--limit", "--overlong"):
        assert f"error: {culprit}" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0"),
        ("max_new_tokens", "many"),
        ("temperature", "-1"),
        ("temperature", "inf"),
        ("repetition_penalty", "inf"),
        ("price_per_gpu_hour", "nan"),
        ("seed", "9223372036854775808"),
        ("seed", "-9223372036854775809"),
        ("top_p", "1.5"),
        ("dtype", "int4"),
        ("target_speedup", "0.5"),
        ("plan_output_tokens", "2.5"),
        ("plan_output_tokens", "0"),
        ("prompt_format", "html"),
        ("device", "gpu"),
        ("device", "cuda:x"),
    ],
)
def test_a_bad_value_is_named_with_its_flag(capsys: pytest.CaptureFixture[str], name: str, value: str) -> None:
    said = mistake(capsys, *REQUIRED, flag(name), value)
    assert f"error: {flag(name)} " in said
    assert f"got '{value}'" in said


@pytest.mark.parametrize("name", ["min_new_tokens", "plan_output_tokens"])
def test_options_that_contradict_each_other_are_named(capsys: pytest.CaptureFixture[str], name: str) -> None:
    said = mistake(capsys, *REQUIRED, flag(name), "9", "--max-new-tokens", "8")
    assert f"{name} 9 exceeds max_new_tokens 8" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas", "2", "--min-replicas", "3"], "min_replicas 3 exceeds replicas 2"),
        (["--stop", "END", ""], "stop strings must not be empty"),
    ],
)
def test_options_that_no_job_can_follow_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert f"error: {said}\n" in mistake(capsys, *REQUIRED, *arguments)


@pytest.mark.parametrize("engine", [["--engine", "torch"], ["--device", "cpu"]])
@pytest.mark.parametrize("name", ["quantization", "cache_dtype"])
def test_options_of_vllm_are_refused_where_it_cannot_run(
    capsys: pytest.CaptureFixture[str], name: str, engine: list[str]
) -> None:
    said = mistake(capsys, *REQUIRED, flag(name), "fp8", *engine)
    assert f"{name} is an option of vLLM alone: add --engine vllm" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modle", "x"], "--modle is not an option: did you mean --model?"),
        (["--mod=x"], "--mod is not an option: did you mean --model?"),
        (["--max_new_tokens", "5"], "--max_new_tokens is not an option: did you mean --max-new-tokens?"),
        (["--xyz"], "--xyz is not an option\n"),
        (["stray"], "'stray' belongs to no option"),
    ],
)
def test_an_unknown_flag_is_named_and_the_nearest_right_one(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert f"error: {said}" in mistake(capsys, *REQUIRED, *arguments)


def test_an_unknown_key_of_the_config_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: in/\noutput: out/\nmodle: x\n")
    assert "--modle is not an option: did you mean --model?" in mistake(capsys, "--config", str(file))


@pytest.mark.parametrize("content", ["input: [", "- a list\n", "just words", "\x00"])
def test_a_malformed_config_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    assert f"--config '{file}' cannot be read" in mistake(capsys, "--config", str(file))


def test_a_config_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config 'no/such.yaml' cannot be read" in mistake(capsys, "--config", "no/such.yaml")


JOBS = [
    SummarizeCorpus, DatasetConfig, CalibrateSchedule, AdaptModel, EvaluateSchedule, InspectRun, BenchmarkJob,
    BenchmarkPipeline, WriteShape,
]  # fmt: skip
POSITIONAL = {InspectRun: "output"}


@pytest.mark.parametrize("config_class", JOBS)
def test_help_explains_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, config_class: type[BaseModel]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # narrower, lines would break within words that have dashes
    positional = POSITIONAL.get(config_class)
    with pytest.raises(SystemExit) as ended:
        command_line.parse(config_class, "job.py", ["--help"], positional)
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in config_class.model_fields.items():
        assert f" {name.upper() if name == positional else flag(name)} " in f"{shown} ".replace(",", " ")
        assert field.description is not None
        assert " ".join(field.description.split()) in shown
    assert "--config" in shown


@pytest.mark.parametrize("given", [["--output", "out"], ["--output=out"]])
def test_what_is_given_by_its_place_is_said_to_be(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.parse(InspectRun, "job.py", given, positional="output")
    said = capsys.readouterr().err
    assert "--output is not an option: give OUTPUT by its place, without a flag\n" in said
    with pytest.raises(SystemExit, match="2"):
        command_line.parse(InspectRun, "job.py", ["out", "--outputs"], positional="output")
    assert "--outputs is not an option\n" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--output", "--prompt", "--stop"])
def test_what_is_no_utf8_is_refused_before_ray_or_a_tokenizer_fails_over_it(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = os.fsdecode(b"caf\xe9")  # Latin-1
    with pytest.raises(SystemExit, match="2"):
        command_line.parse(SummarizeCorpus, "job.py", ["--input", "in", "--output", "out", option, said])
    assert f"{option} is no valid UTF-8, got 'caf\\udce9'" in capsys.readouterr().err


def test_paths_of_benchmarks_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = command_line.parse(BenchmarkJob, "job.py", ["--input=~/a.parquet", "--schedules=~/1.5x", "--output=~/out"])
    assert [*map(str, [*given.input, *given.schedules, given.output])] == [
        "/home/me/a.parquet", "/home/me/1.5x", "/home/me/out",
    ]  # fmt: skip


def test_help_shows_the_few_values_that_an_option_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(DatasetConfig, "job.py", ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--duplicates {keep,exact,normalized}" in shown
    assert "--overlong {truncate,reject}" in shown
    assert "--batch-size BATCH_SIZE" in shown


def test_help_shows_options_under_what_they_are_about(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    _, where, depth, how, storage, *_ = capsys.readouterr().out.split("\n\n")[2:]
    assert where.startswith("Where a job reads and writes")
    assert "--input" in where
    assert "--schedule" in depth
    assert "--prompt " in how
    assert "--s3-endpoint" in storage


def ends_with(error: BaseException) -> Callable[[], None]:
    """A job that raises it."""

    def job() -> None:
        raise error

    return job


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        *((error, 1, "error") for error in (JobError, ModelError, PromptError, ScheduleError, FloatingPointError)),
        (NothingToDo, 0, "nothing to do"),
        (UnitsFailed, 3, "incomplete"),  # with which a rerun goes on
        (StorageGone, 4, "stopped"),  # likewise
    ],
)
def test_how_a_job_ended_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: type[Exception], code: int, word: str
) -> None:
    assert command_line.run("job.py", ends_with(error("the model 'x' is gone"))) == code
    assert capsys.readouterr().err == f"job.py: {word}: the model 'x' is gone\n"


@pytest.mark.parametrize("machines", [False, True])
def test_an_interrupted_job_says_so_and_can_be_started_again(
    machines: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.logs.for_machines", lambda: machines)
    assert command_line.run("job.py", ends_with(KeyboardInterrupt())) == 4
    said = caplog.messages if machines else [capsys.readouterr().err.removeprefix("job.py: ").rstrip("\n")]
    assert said == ["stopped: interrupted; start it again"]


def test_sigterm_ends_a_job_as_ctrl_c_does_whatever_it_is_at_and_a_second_one_does_not_disturb_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(_: BaseModel) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr("sys.argv", ["job.py", "--input", "in", "--output", "out"])
    assert command_line.start(SummarizeCorpus, "job.py", job) == 4
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert "stopped: interrupted; start it again" in capsys.readouterr().err


def test_no_mistake_repeats_what_lets_anyone_in(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(SummarizeCorpus, "job.py", ["s3://AKIAKEY:SECRET@bucket/in", "--batch-size", "x:SECRET@y"])
    error = ModelError("model 's3://AKIAKEY:SECRET@bucket/m' does not exist")
    assert command_line.run("job.py", ends_with(error)) == 1
    said = capsys.readouterr().err
    assert "belongs to no option" in said
    assert "does not exist" in said
    assert "AKIAKEY" not in said


@pytest.mark.parametrize(
    ("number", "name", "said"),
    [
        (errno.ENOSPC, "out/figures.json", "'out/figures.json' cannot be written (No space left on device): make room"),
        (errno.EDQUOT, Path("out/x"), "'out/x' cannot be written (Disk quota exceeded): make room"),
        (errno.ENOSPC, None, "a file cannot be written (No space left on device): make room"),
        (errno.EROFS, "out/x", "'out/x' cannot be read or written (Read-only file system): mend that"),
        (errno.EACCES, "out/x", "'out/x' cannot be read or written (Permission denied): mend that"),
        (errno.EIO, "out/x", "'out/x' cannot be read or written (Input/output error): mend that"),
    ],
)
def test_what_a_disk_does_not_do_is_one_line_and_can_be_started_again(
    number: int, name: str | Path | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.run("job.py", ends_with(OSError(number, "some words", name))) == 4
    assert capsys.readouterr().err == f"job.py: stopped: {said} and start it again\n"


@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")])
def test_memory_that_runs_out_is_one_line_with_the_way_out(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.run("job.py", ends_with(error)) == 1
    assert re.fullmatch(r"job.py: error: memory ran out \(.*\): lower batch_size, .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), FileNotFoundError(errno.ENOENT, "no such file", "x")])
def test_a_bug_and_an_error_that_no_disk_makes_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        command_line.run("job.py", ends_with(error))


def test_a_reader_that_is_gone_is_told_in_a_sentence() -> None:
    script = """
from jobs import command_line
print(command_line.run("job", lambda: print("x", flush=True)), file=open(2, "w"))
"""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as gone:
        done = subprocess.run([sys.executable, "-c", script], stdout=gone, stderr=subprocess.PIPE, text=True)
    assert done.stderr.splitlines() == ["job: stopped: nobody reads what it prints any more; start it again", "4"]


def test_a_user_without_a_home_may_start_jobs() -> None:
    """As in a container with a number for a user: libraries look for a home as they are imported."""
    script = """
import os, pwd
del os.environ["HOME"]
pwd.getpwuid = {}.__getitem__
import jobs.generate_dataset, jobs.inspect_run
from engine.checkpoints.digests import cache_directory
print(cache_directory())
"""
    environment = {name: value for name, value in os.environ.items() if name != "SKIPDECODE_CACHE"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout == "/.cache/skipdecode\n", done.stderr
