"""Whatever of a model, its prompts or its input changes between and during the starts of a job: no output holds rows of
two identities.

The engine is a double whose generations begin with a digest of what it was loaded from; checkpoints, tokenizers and
the checks of them are the real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import Echo
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from inline_session import InlineSession, without_ray
from safetensors.torch import load_file, save_file

from engine import ModelError, model_files
from engine.checkpoint import check_files
from pipeline.backend import SkipDecodeBackend
from pipeline.commit import read_commits
from pipeline.config import GenerationConfig, JobConfig
from pipeline.errors import JobError, JobStopped, UnitsFailed
from pipeline.run import run_job
from pipeline.storage import Storage

TEMPLATES = (
    "{{ messages[0].content }}",
    "user: {{ messages[0].content }}",
    "{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {{ messages[0].content }}",
)


class NamedBackend(SkipDecodeBackend):
    """The real backend but for the engine, which writes which model it is before the prompt's first tokens."""

    def engine(self, config: GenerationConfig, threads: int | None) -> Echo:  # type: ignore[override]
        assert self.held is not None
        check_files(config.model, self.held.files)
        files = model_files(config.model)
        return NamedEcho(prefix=f"{json.dumps(sorted(files.items()))}|{config.temperature}|{self.began}|")


class NamedEcho(Echo):
    """Texts of ids are of no interest here."""

    def generate(self, prompts, *arguments, **named):  # type: ignore[no-untyped-def]
        safe = [[min(token, 127) for token in prompt] for prompt in prompts]
        return super().generate(safe, *arguments, **named)


class Jobs(RuleBasedStateMachine):
    """A model, an input and an output; anything is changed, and the job is started again and again."""

    original: Path
    session: type[InlineSession]
    finished = 0
    refusals: list[str]

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.model = self.folder / "model"
        shutil.copytree(self.original, self.model)
        (self.model / "chat_template.jinja").write_text(TEMPLATES[0])
        self.temperature, self.system, self.count = 0.0, None, 0
        self.write_input()

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule()
    def change_input(self) -> None:
        self.write_input()

    def write_input(self) -> None:
        self.count += 1
        (self.folder / "in").mkdir(exist_ok=True)
        texts = [f"{self.count} row {row}" for row in range(6)]
        pq.write_table(pa.table({"text": texts, "made": [self.count] * 6}), self.folder / "in/a.parquet")

    def change_weights(self) -> None:
        """A bit at the file's end; size and time of writing stay."""
        file = self.model / "model.safetensors"
        stat = file.stat()
        tensors = load_file(file)
        name = "model.norm.weight"
        save_file({**tensors, name: tensors[name] + 1}, file)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    @rule()
    def weights(self) -> None:
        self.change_weights()

    @rule(template=st.sampled_from(TEMPLATES))
    def change_template(self, template: str) -> None:
        self.template(template)

    def template(self, template: str) -> None:
        (self.model / "chat_template.jinja").write_text(template)

    @rule(end=st.integers(1, 3))
    def change_generation_config(self, end: int) -> None:
        self.generation_config(end)

    def generation_config(self, end: int) -> None:
        (self.model / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))

    @rule(added=st.booleans())
    def tokenizer(self, added: bool) -> None:
        file = self.model / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"]["merges"] = [["a", "b"]] if added and "ab" in content["model"]["vocab"] else []
        content["truncation"] = None
        file.write_text(json.dumps(content, indent=1 if added else 2))

    @rule(temperature=st.sampled_from([0.0, 1.0]))
    def sampling(self, temperature: float) -> None:
        self.temperature = temperature

    @rule(system=st.sampled_from([None, "Be kind."]))
    def prompt(self, system: str | None) -> None:
        self.system = system

    @rule()
    def a_good_start(self) -> None:
        self.start(None, None)

    @rule(stop_after=st.integers(1, 3))
    def a_start_that_is_stopped(self, stop_after: int) -> None:
        self.start(stop_after, None)

    @rule(which=st.sampled_from(["weights", "input"]), at=st.integers(0, 2))
    def a_start_during_which_something_changes(self, which: str, at: int) -> None:
        self.start(None, (which, at))

    @rule(change=st.sampled_from(["weights", "template", "generation_config", "input"]))
    def a_change_between_two_starts_of_an_unfinished_run(self, change: str) -> None:
        self.fresh()
        self.start(1, None)
        if change == "weights":
            self.change_weights()
        elif change == "template":
            self.template(TEMPLATES[self.count % 2])
        elif change == "generation_config":
            self.generation_config(self.count % 3 + 1)
        else:
            self.write_input()
        self.start(None, None)

    @rule()
    def begin_anew(self) -> None:
        self.fresh()

    def fresh(self) -> None:
        shutil.rmtree(self.folder / "out", ignore_errors=True)

    def start(self, stop_after: int | None, change: tuple[str, int] | None) -> None:
        done = 0

        def begin_unit(session: object, unit: object) -> None:
            nonlocal done
            if change is not None and done == change[1]:
                self.change_weights() if change[0] == "weights" else self.write_input()
            done += 1

        self.session.stop_after = stop_after
        self.session.begin_unit = begin_unit  # type: ignore[method-assign, assignment]
        config = JobConfig(
            input=str(self.folder / "in"),
            output=str(self.folder / "out"),
            model=str(self.model),
            rows_per_unit=2,
            replicas=1,
            max_new_tokens=200,
            temperature=self.temperature,
            system=self.system,
        )
        try:
            run_job(config, NamedBackend())
            Jobs.finished += 1
        except JobStopped:
            pass
        except (JobError, ModelError, UnitsFailed) as error:
            Jobs.refusals.append(str(error))

    @invariant()
    def rows_are_of_one_identity(self) -> None:
        if not hasattr(self, "folder") or not (self.folder / "out").exists():
            return
        tables = [pq.read_table(self.folder / "out" / c.file) for c in read_commits(Storage(str(self.folder / "out")))]
        rows = [row for table in tables for row in table.to_pylist() if row["error"] is None]
        assert len({row["generation"].rpartition("|")[0] for row in rows}) <= 1
        assert len({row["made"] for row in rows}) <= 1


def test_no_output_holds_rows_of_two_identities(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    Jobs.original = make_checkpoint()
    Jobs.session = without_ray(monkeypatch)
    Jobs.TestCase.settings = settings(max_examples=10, stateful_step_count=8, deadline=None)
    Jobs.finished, Jobs.refusals = 0, []
    Jobs.TestCase("runTest").debug()  # type: ignore[attr-defined]
    assert Jobs.finished
    assert any("differs in model: the " in said for said in Jobs.refusals)
    assert not any("\n" in said for said in Jobs.refusals)


def test_a_model_replaced_after_the_run_was_prepared_is_refused_by_name(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    model = Path(shutil.copytree(make_checkpoint(), tmp_path / "model"))
    config = GenerationConfig(model=str(model), device="cpu")
    backend = SkipDecodeBackend()
    held = backend.held_to(backend.identity(config), "2024-02-29T12:00:00")
    held.engine(config, 1)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ModelError, match=r"model' is not the one .*: the weights file model\.safetensors differs"):
        held.engine(config, 1)
    held.tokenizer(config)  # who only makes prompts reads no weights
    (model / "chat_template.jinja").write_text("other")
    held = backend.held_to(held.held or backend.identity(config), "2024-02-29T13:00:00")
    with pytest.raises(ModelError, match=r"the chat template's file chat_template\.jinja is new"):
        held.tokenizer(config)


def test_chat_templates_see_the_date_at_which_the_run_began(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(make_checkpoint(), tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}")
    config = GenerationConfig(model=str(model), device="cpu")
    backend = SkipDecodeBackend()
    tokenizer = backend.held_to(backend.identity(config), "2024-02-29T12:00:00").tokenizer(config)
    assert tokenizer.decode(tokenizer.encode_chat("x")) == "29 Feb 2024: x"


def test_auto_is_resolved_in_what_a_model_is(make_checkpoint: Callable[..., Path]) -> None:
    model = str(make_checkpoint())
    found = [
        SkipDecodeBackend().identity(GenerationConfig(model=model, device="cpu", dtype=dtype)).dtype  # type: ignore[arg-type]
        for dtype in ("auto", "float32", "bfloat16")
    ]
    assert found == ["float32", "float32", "bfloat16"]
