"""Whatever of a model, a schedule, prompts or input changes between and during the starts of a job: no output holds
rows of two identities.

The engine is a double whose generations begin with a digest of what it was loaded from; checkpoints, tokenizers and
the checks of them are the real ones.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from engine_double import Echo
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from inline_session import InlineSession
from safetensors.torch import load_file, save_file

from engine import Block, Bridge, ModelError, Schedule, model_files
from engine.checkpoints.checkpoint import check_files
from engine.schedules import decays, orders
from pipeline.commits.commit import read_commits
from pipeline.config import GenerationConfig, JobConfig
from pipeline.errors import JobError, JobStopped, UnitsFailed
from pipeline.evaluation.bridged_rivals import attach
from pipeline.preparing.backend import Backend
from pipeline.preparing.preparation import absolute_model
from pipeline.run import run_job
from pipeline.storage.storage import Storage

TEMPLATES = (
    "{{ messages[0].content }}",
    "user: {{ messages[0].content }}",
    "{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {{ messages[0].content }}",
)
CHANGES = ("weights", "template", "generation_config", "schedule", "input")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of files are kept in the test's own directory."""
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))


class NamedBackend(Backend):
    """The real backend but for the engine, which writes which model it is before the prompt's first tokens."""

    def engine(self, config: GenerationConfig, threads: int | None) -> Echo:  # type: ignore[override]
        assert self.held is not None
        check_files(config.model, self.held.files)
        files = model_files(config.model)
        return NamedEcho(f"{json.dumps(sorted(files.items()))}|{config.temperature}|{self.began}|")


class NamedEcho(Echo):
    """Texts of ids are of no interest here."""

    def generate(self, prompts, sampling=None, schedule=None, *arguments, **named):  # type: ignore[no-untyped-def]
        safe = [[min(token, 127) for token in prompt] for prompt in prompts]
        named_too = Echo(f"{self.prefix}{schedule.to_json()}|")
        return named_too.generate(safe, sampling, schedule, *arguments, **named)


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
        self.schedule: str | None = None
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

    @rule(named=st.booleans(), bridge=st.sampled_from([None, 0.0, 1.0]))
    def change_schedule(self, named: bool, bridge: float | None) -> None:
        self.write_schedule(bridge)
        self.schedule = str(self.folder / "schedule") if named else None

    def write_schedule(self, bridge: float | None) -> None:
        """Skipping a block, whose bridge's bias is given, under the same name as the schedule before."""
        schedule = Schedule.build(5, orders.of_layers([2, 3]), decays.linear(0, 2, 2), horizon=2)
        if bridge is not None:
            made = partial(Bridge.affine, weight=torch.zeros(32, 32), bias=torch.full([32], bridge))
            schedule = attach(schedule, lambda block: deepcopy(made(Block.of_layers(*block))))
        schedule.write(self.folder / "schedule")

    @rule()
    def a_good_start(self) -> None:
        self.start(None, None)

    @rule(stop_after=st.integers(1, 3))
    def a_start_that_is_stopped(self, stop_after: int) -> None:
        self.start(stop_after, None)

    @rule(which=st.sampled_from(["weights", "input"]), at=st.integers(0, 2))
    def a_start_during_which_something_changes(self, which: str, at: int) -> None:
        self.start(None, (which, at))

    @rule(change=st.sampled_from(CHANGES))
    def a_change_between_two_starts_of_an_unfinished_run(self, change: str) -> None:
        self.fresh()
        if change == "schedule":
            self.write_schedule(bridge=0.0)
            self.schedule = str(self.folder / "schedule")
        self.start(1, None)
        if change == "schedule":
            self.write_schedule(bridge=0.5)
        elif change == "weights":
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
            schedule=self.schedule,
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
    make_checkpoint: Callable[..., Path], inline: type[InlineSession]
) -> None:
    Jobs.original = make_checkpoint()
    Jobs.session = inline
    Jobs.TestCase.settings = settings(max_examples=10, stateful_step_count=8, deadline=None)
    Jobs.finished, Jobs.refusals = 0, []
    for change in CHANGES:
        jobs = Jobs()
        jobs.begin()
        jobs.a_change_between_two_starts_of_an_unfinished_run(change)
        jobs.rows_are_of_one_identity()
        jobs.teardown()
    parts = ["model: the weights file", "model: the chat template", "model: the generation config", "schedule: "]
    assert [next(part for part in [*parts, "a.parquet"] if part in said) for said in Jobs.refusals] == [
        *parts, "a.parquet",
    ]  # fmt: skip
    Jobs.TestCase("runTest").debug()  # type: ignore[attr-defined]
    assert Jobs.finished
    assert not any("\n" in said for said in Jobs.refusals)


def test_a_model_replaced_after_the_run_was_prepared_is_refused_by_name(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(make_checkpoint(), tmp_path / "model"))
    config = GenerationConfig(model=str(model), device="cpu")
    backend = Backend()
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


def test_a_run_has_the_commit_that_a_hub_id_meant_when_it_began(
    make_checkpoint: Callable[..., Path], tmp_path: Path, inline: type[InlineSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both commits hold the same files here: it is the name that is told apart."""
    first, later = "0" * 39 + "1", "0" * 39 + "2"
    repository = tmp_path / "hub" / "models--somebody--some-model"
    for commit in (first, later):
        shutil.copytree(make_checkpoint(), repository / "snapshots" / commit)
    reference = repository / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text(first)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["one", "two", "three"]}), tmp_path / "in/a.parquet")
    inline.stop_after = 1

    def run(model: str) -> None:
        config = JobConfig(
            input=str(tmp_path / "in"), output=str(tmp_path / "out"), model=model, rows_per_unit=1, replicas=1,
            max_new_tokens=200, prompt_format="raw",
        )  # fmt: skip
        run_job(config, NamedBackend())

    with pytest.raises(JobStopped):
        run("somebody/some-model")
    assert json.loads((tmp_path / "out/_run.json").read_text())["model"][0] == f"somebody/some-model@{first}"
    inline.stop_after = None
    reference.write_text(later)
    with pytest.raises(JobError, match=f"differs in model: .*{first[-9:]}.* -> .*{later[-9:]}"):
        run("somebody/some-model")
    run(f"somebody/some-model@{first}")
    files = [tmp_path / "out" / commit.file for commit in read_commits(Storage(str(tmp_path / "out")))]
    assert sum(pq.read_table(file).num_rows for file in files) == 3


def test_chat_templates_see_the_date_at_which_the_run_began(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(make_checkpoint(), tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}")
    config = GenerationConfig(model=str(model), device="cpu")
    backend = Backend()
    tokenizer = backend.held_to(backend.identity(config), "2024-02-29T12:00:00").tokenizer(config)
    assert tokenizer.decode(tokenizer.encode_chat("x")) == "29 Feb 2024: x"


def test_auto_is_resolved_in_what_a_model_is(make_checkpoint: Callable[..., Path]) -> None:
    model = str(make_checkpoint())
    found = [
        Backend().identity(GenerationConfig(model=model, device="cpu", dtype=dtype)).dtype  # type: ignore[arg-type]
        for dtype in ("auto", "float32", "bfloat16")
    ]
    assert found == ["float32", "float32", "bfloat16"]


def test_workers_find_a_model_by_its_own_name_and_another_hub_id_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v1").mkdir()
    (tmp_path / "now").symlink_to("v1")
    (tmp_path / "3f2a").write_text("")
    (tmp_path / "tiny.gguf").symlink_to("3f2a")
    found = [absolute_model(model) for model in ("now", "tiny.gguf", "somebody/some-model")]
    assert found == [f"{tmp_path}/v1", f"{tmp_path}/tiny.gguf", "somebody/some-model"]
