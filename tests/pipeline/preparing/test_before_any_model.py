"""What cannot work is said in one sentence, before a model is loaded and before anything is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from fixture_types import Job, WriteParquet
from pydantic import ValidationError

from engine import Engine, ModelError, ScheduleError
from pipeline.config import GenerationConfig, JobConfig
from pipeline.errors import JobError
from pipeline.preparing.backend import Backend
from pipeline.run import run_job


class DescribedOnly(Backend):
    """The real backend as far as a model's config and tokenizer go."""

    def engine(self, config: GenerationConfig, threads: int | None) -> Engine:
        raise AssertionError("the model was loaded")


@pytest.fixture
def refusal(tmp_path: Path, job: Job, write_parquet: WriteParquet) -> Callable[..., str]:
    """Runs a job on a good input, unless an option says otherwise, and returns the message it ends with."""
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"], "id": [1]})

    def run(kind: type[Exception], **options: object) -> str:
        with pytest.raises(kind) as refused:
            run_job(job(**options), DescribedOnly())
        assert not (tmp_path / "out").exists()
        assert "\n" not in str(refused.value)
        return str(refused.value)

    return run


@pytest.fixture
def write_schedule(tmp_path: Path) -> Callable[[object], str]:
    """A schedule file of any content."""

    def write(content: object) -> str:
        path = tmp_path / "schedule.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_a_missing_text_column(refusal: Callable[..., str]) -> None:
    message = refusal(JobError, text_column="body")
    assert "no column 'body'" in message
    assert "id, text" in message


def test_an_unreadable_file(tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "in/a.parquet").write_bytes(b"not parquet")
    assert "a.parquet' cannot be read as Parquet" in refusal(JobError)


def test_an_input_column_that_the_output_needs(
    tmp_path: Path, refusal: Callable[..., str], write_parquet: WriteParquet
) -> None:
    write_parquet(tmp_path / "in/b.parquet", {"text": ["x"], "error": pa.nulls(1, pa.string())})
    assert "column 'error'" in refusal(JobError)


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/model", "./model.gguf"])
def test_an_unknown_model(refusal: Callable[..., str], model: str) -> None:
    assert f"model {model!r} does not exist" in refusal(ModelError, model=model)


def test_a_directory_that_holds_no_model(tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "model").mkdir()
    assert f"{tmp_path}/model' has no config.json" in refusal(ModelError, model=str(tmp_path / "model"))


def test_a_system_text_that_the_chat_template_refuses(
    refusal: Callable[..., str], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(make_checkpoint(), tmp_path / "model"))
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}a"
    (model / "chat_template.jinja").write_text(refuses)
    message = refusal(ModelError, model=str(model), prompt_format="chat", system="Be brief.")
    assert "refuses a chat of system, user (no system here): leave out --system" in message


def test_a_schedule_for_another_depth(refusal: Callable[..., str], write_schedule: Callable[[object], str]) -> None:
    path = write_schedule({"format": 1, "layers": 12, "skip_order": ["a4", "m4"], "skipped": [[0, 2]]})
    message = refusal(ScheduleError, schedule=path)
    assert "12 layers" in message
    assert "30" in message


@pytest.mark.parametrize(
    ("content", "culprit"),
    [
        ("{", "cannot be read: Expecting property name"),
        ({"format": 9}, "format 9"),
    ],
)
def test_a_malformed_schedule_file(
    refusal: Callable[..., str], write_schedule: Callable[[object], str], content: object, culprit: str
) -> None:
    path = write_schedule(content)
    message = refusal(ScheduleError, schedule=path)
    assert culprit in message
    assert path in message


def test_a_schedule_file_that_is_not_there(refusal: Callable[..., str]) -> None:
    assert "'/no/such/schedule.json' cannot be read" in refusal(ScheduleError, schedule="/no/such/schedule.json")


def test_a_speedup_out_of_reach(refusal: Callable[..., str]) -> None:
    message = refusal(ScheduleError, target_speedup=50.0)
    assert "50x cannot be met" in message
    assert "at most" in message


def test_more_new_tokens_than_the_context_holds(refusal: Callable[..., str]) -> None:
    message = refusal(JobError, max_new_tokens=1_000_000)
    assert "max_new_tokens 1000000 leaves no room" in message
    assert "8192" in message


def test_a_prompt_without_the_text(refusal: Callable[..., str]) -> None:
    assert "{text}" in refusal(JobError, prompt="Summarise {id}")


def test_an_output_on_an_unknown_storage(refusal: Callable[..., str]) -> None:
    assert "gopher://out" in refusal(JobError, output="gopher://out")


@pytest.mark.parametrize("option", ["input", "output"])
def test_a_path_in_the_working_directory_of_a_submitted_job(
    refusal: Callable[..., str], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray unpacks it anew on each node, and after each change of the code."""
    package = tmp_path / "working_dir_files" / "_ray_pkg_1"
    package.mkdir(parents=True)
    monkeypatch.chdir(package)
    message = refusal(JobError, **{option: "texts"})
    assert f"{option} 'texts' lies in the working directory that travels with a submitted job" in message


def test_a_path_in_the_home_directory_is_one_where_no_shell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    config = JobConfig(input="~/in", output="~/out", schedule="~/schedule")
    assert [config.input, config.output, config.schedule] == [
        "/home/of/mine/in", "/home/of/mine/out", "/home/of/mine/schedule"
    ]  # fmt: skip


def test_an_input_that_is_empty_is_not_the_directory_that_the_job_was_started_in() -> None:
    with pytest.raises(ValidationError, match="at least 1 character"):
        JobConfig(input="", output="out")
