"""Files of records that stand in no output, as our own writers make them, damaged, and what reads them."""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from damaged_json import put_instead, values, with_bytes_changed, with_value_changed
from engine_double import Echo, EchoBackend
from pydantic import TypeAdapter
from trials import sentence

from engine import (
    Block,
    Bridge,
    EarlyExit,
    Generation,
    HeadPreview,
    ModelError,
    Plateau,
    Sampling,
    Schedule,
    Unit,
)
from engine import PromptBridge as Prompts
from engine.adaptation.checkpoint import TrainingState, read_state, training_identity, write_state
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainable import Trainable
from engine.checkpoints.digests import file_digest
from engine.checkpoints.weight_files import INDEX, Weights
from engine.errors import ScheduleError
from engine.models.decoder import Decoder
from engine.parts.adapter import Adapter
from jobs import command_line
from pipeline.config import JobConfig
from pipeline.dataset.config import DatasetConfig
from pipeline.dataset.filters import Filters
from pipeline.dataset.generate import generate_dataset
from pipeline.dataset.json_filter import JsonFilter
from pipeline.dataset.openai_batch import read_requests, write_requests
from pipeline.errors import JobError, UnitsFailed
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.rivals import RivalCalibration, SolvedRivals
from pipeline.evaluation.study import BatchTiming, Prompt, Study
from pipeline.rows.template import RowError, _messages
from pipeline.run import run_job
from pipeline.storage.storage import Storage

BACKEND = EchoBackend(Echo("said: "))
SHAPE = BACKEND.shape(JobConfig(input="-", output="-"))
ENDS = (JobError, ModelError, ScheduleError, UnitsFailed)

Read = Callable[[], str]
Part = Callable[[random.Random, Path, Path], tuple[str, Read]]


def said(read: Callable[[], object]) -> str:
    try:
        read()
    except ENDS as error:
        return sentence(error)
    return ""


def damage(draw: random.Random, path: Path, canary: Path, is_json: bool = True) -> str:
    how = draw.random()
    if how < 0.1:
        return put_instead(draw, path, canary)
    if how < 0.4 or not is_json:
        what, content = with_bytes_changed(draw, path.read_bytes())
    else:
        what, content = with_value_changed(draw, path.read_bytes(), canary)
    path.write_bytes(content)
    return what


def in_header(draw: random.Random, path: Path, canary: Path) -> str:
    """Damage a safetensors file, mostly in its header's JSON, metadata included."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if draw.random() < 0.4:
        return damage(draw, path, canary, is_json=False)
    header, rest = content[8 : 8 + length], content[8 + length :]
    described = json.loads(header)
    if "__metadata__" in described and draw.random() < 0.8:
        what, text = with_value_changed(draw, described["__metadata__"]["state"].encode(), canary)
        described["__metadata__"]["state"] = text.decode(errors="replace")
        header = json.dumps(described).encode()
    else:
        what, header = with_value_changed(draw, header, canary)
    path.write_bytes(len(header).to_bytes(8, "little") + header + rest)
    return what


def schedule() -> Schedule:
    """With every part that there is, for the double's shape."""
    width, draw = SHAPE.hidden, torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).half()

    units = tuple(Block.of_layers(1, 3).units)
    return Schedule(
        SHAPE.layers, units, (Plateau(0, 2, ("1-2",)), Plateau(4, 4, ("1-3",))), {"name": "fuzzed", "kl": 0.1},
        bridges={
            f"1-{end}": Bridge.affine(Block.of_layers(1, end), some(width, width), some(width)) for end in (2, 3)
        },
        prompt_bridge=Prompts(2, {"weight": some(width, 2 * 2 * SHAPE.kv_heads * SHAPE.head_dim),
                                  "bias": some(2 * 2 * SHAPE.kv_heads * SHAPE.head_dim)}),
        adapter=Adapter({"a3.q.down": some(width, 2), "a3.q.up": some(2, width)}, changes_prompts=True),
        head_preview=HeadPreview(3, {"down": some(width, 2), "up": some(2, width), "bias": some(SHAPE.vocab)}),
    )  # fmt: skip


def a_schedule(draw: random.Random, folder: Path, canary: Path) -> tuple[str, Read]:
    schedule().write(folder / "made")
    name = draw.choice(["schedule.json"] * 4 + ["bridges.safetensors", "adapter.safetensors"])
    file = folder / "made" / name
    what = damage(draw, file, canary) if name == "schedule.json" else in_header(draw, file, canary)
    (folder / "in").mkdir()
    pq.write_table(pa.table({"text": ["one", "two"]}), folder / "in/a.parquet")
    config = JobConfig(
        input=str(folder / "in"), output=str(folder / "out"), max_new_tokens=5, prompt="{text}", prompt_format="raw",
        schedule=str(folder / "made"),
    )  # fmt: skip
    return f"{name} {what}", lambda: said(lambda: run_job(config, BACKEND))


def a_checkpoint(draw: random.Random, folder: Path, canary: Path) -> tuple[str, Read]:
    whole = schedule()
    schedules = [replace(whole, head_preview=None)]
    nothing = cast(Decoder, SimpleNamespace(projections=lambda unit: {}))  # nothing is added
    trainables = [Trainable(schedules, nothing, torch.device("cpu"), Recipe(adapter_rank=0)) for _ in range(2)]
    first, second = (torch.optim.AdamW(trainable.parameters.values()) for trainable in trainables)
    for parameter in trainables[0].parameters.values():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    state = TrainingState(trainables[0].snapshot(), 0.5, 1, 0, 1.5, [(0, 0.6, 0.6, 0.5, 0.0), (1, 0.5, 0.5, 0.6, 1.0)])
    path = folder / "training.safetensors"
    identity = training_identity(Recipe(adapter_rank=0), schedules, [], [])
    write_state(path, state, identity, trainables[0], first)
    what = in_header(draw, path, canary)

    def read() -> None:
        if not path.exists():
            return
        found = read_state(path, identity, trainables[1], second)
        # What is read is whole: a digest stands beside it.
        assert replace(found, best={}) == replace(state, best={})
        assert found.best.keys() == state.best.keys()
        assert all(torch.equal(found.best[name], value) for name, value in state.best.items())
        second.step()
        trainables[1].restore(found.best)

    return what, lambda: said(read)


REQUEST: dict[str, Any] = {
    "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "Name a lake."}], "max_tokens": 9,
             "temperature": 0.0, "stop": ["\n"], "n": 1, "seed": 3, "metadata": {"a": "b"}},
}  # fmt: skip


def requests(draw: random.Random, folder: Path, canary: Path) -> tuple[str, Read]:
    lines = [json.dumps({"custom_id": f"r{number}", **REQUEST}) for number in range(3)]
    path = folder / "requests.jsonl"
    if draw.random() < 0.6:
        what, line = with_value_changed(draw, lines[1].encode(), canary)
        lines[1] = line.decode(errors="surrogateescape").replace("\n", " ")
        path.write_text("\n".join(lines), errors="surrogateescape")
    else:
        path.write_text("\n".join(lines))
        what = damage(draw, path, canary, is_json=False)
    config = DatasetConfig(
        input=str(path), output=str(folder / "out"), input_format="openai-batch", output_format="openai-batch",
        storage_patience_s=1.0,
    )  # fmt: skip
    if draw.random() < 0.3:
        return what, lambda: said(lambda: generate_dataset(config, BACKEND))
    return what, lambda: said(
        lambda: write_requests(Storage(str(folder / "out")), read_requests(config.input_storage().at_first()))
    )


def messages(draw: random.Random, folder: Path, canary: Path) -> tuple[str, Read]:
    """A row's."""
    given = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a lake."}]
    change = partial(with_value_changed, canary=canary) if draw.random() < 0.7 else with_bytes_changed
    what, content = change(draw, json.dumps(given).encode())

    def read() -> str:
        try:
            found = _messages(content.decode(errors="surrogateescape"))
        except RowError as error:
            return str(error)
        assert all(isinstance(value, str) for message in found for value in message.values())
        return ""

    return what, read


def rivals(draw: random.Random, folder: Path, canary: Path) -> tuple[str, Read]:
    plain = Schedule(4, (Unit("a", 1), Unit("m", 1)), (Plateau(0, 2),), {"name": "plain"})
    exits = EarlyExit("CALM-DEC", (1, 2), 0.5)
    solved = SolvedRivals(folder, "model", Sampling(max_new_tokens=5), [[1, 2]])
    for name, method in (("one", plain), ("two", exits)):
        rival = Contender(name, 1.3, method, is_rival=True, note="fitted")
        (folder / solved._file(name, 1.3)).write_bytes(TypeAdapter(Contender).dump_json(rival))
    what = damage(draw, draw.choice(sorted(folder.glob("*.json"))), canary)

    def measure() -> RivalCalibration:
        raise JobError("it would be solved again")

    def read() -> None:
        for contender in solved.solve(["one", "two"], [1.3], measure):
            assert contender.identity + contender.label + contender.note

    return what, lambda: said(read)


def study(draw: random.Random, folder: Path, canary: Path) -> tuple[str, Read]:
    prompts = [Prompt(f"p{number}", "text", "reference", (1, 2, 3), "read") for number in range(4)]
    made = Study(folder, "model", Sampling(max_new_tokens=5), 2, prompts)
    contender = Contender.full_depth(4)

    for batch in made._batches():
        rows = [Generation(i, 0, "said", (4, 5), "stop", 3, 0, 300, 60, 60, 360, 4.0) for i in range(2)]
        judged = {"kl": [0.1], "agrees": [True], "nll": 1.0}
        made._write(contender, batch, rows, [judged] * 2, BatchTiming("s", 2, 0.5))
    file = draw.choice(sorted(folder.glob("*/*.parquet")))
    if draw.random() < 0.5:
        what = damage(draw, file, canary, is_json=False)
    else:
        table = pq.read_table(file)
        what, timing = with_value_changed(draw, table.schema.metadata[b"timing"], canary)
        pq.write_table(table.replace_schema_metadata({b"timing": timing}), file)

    class Nothing:
        """Stands for an engine that is not to be asked."""

        def generate_each(self, *_: object, **__: object) -> Iterator[object]:
            raise JobError("it would be made again")

    def read() -> None:
        made.run(cast(Any, Nothing()), [contender])
        assert made.outputs(contender).num_rows == 4
        assert sum(timing.decode_seconds / max(1, timing.decode_passes) for timing in made.timings(contender)) >= 0

    return what, lambda: said(read)


def config(draw: random.Random, folder: Path, canary: Path) -> tuple[str, Read]:
    options = {
        "input": "in", "output": "out", "max_new_tokens": 9, "keep_columns": ["a", "b"], "temperature": 0.5,
        "stop": ["x"], "prompt": "{text}", "fresh": False,
    }  # fmt: skip
    path = folder / "job.yaml"
    bombs = ["a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a, *a, *a]\n".replace("*a", f"*b{n - 1}" if n else "*a")
                                        for n in range(30)) + "output: *b29", "&a [*a]", "1: 2", "? [a]\n: b",
             "a: 2020-99-99", "!!python/object:os.system x", "a: !!int x", "a: 0x" + "f" * 5000]  # fmt: skip
    how = draw.random()
    if how < 0.15:
        what = "bomb"
        path.write_text(draw.choice(bombs))
    elif how < 0.5:
        name = draw.choice(sorted(options))
        what, options[name] = "value", draw.choice([value for value in values(canary) if not isinstance(value, float)])
        path.write_text(json.dumps(options) if draw.random() < 0.5 else yaml.safe_dump(options))
    else:
        path.write_text(yaml.safe_dump(options))
        what = damage(draw, path, canary, is_json=False)

    def read() -> str:
        lines: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command_line, "print", lambda *words, file: lines.append(" ".join(words)), raising=False)
            with suppress(SystemExit):
                command_line.parse(JobConfig, "job", ["--config", str(path)])
                return ""
        assert all(line.startswith("job: error: ") for line in lines[:-1])
        return [sentence(line) for line in lines][0]  # noqa: RUF015, all are looked at

    return what, read


SCHEMA = {
    "type": "object", "required": ["a"], "additionalProperties": False, "$defs": {"n": {"type": "number"}},
    "properties": {"a": {"type": "string", "pattern": "^a+$", "maxLength": 9}, "b": {"$ref": "#/$defs/n"},
                   "c": {"multipleOf": 0.01, "minimum": 0}, "d": {"type": "array", "items": {"enum": [1, "x"]}}},
}  # fmt: skip


def schema(draw: random.Random, folder: Path, canary: Path) -> tuple[str, Read]:
    path = folder / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    what = damage(draw, path, canary)

    def read() -> None:
        Filters(DatasetConfig(input="-", output="-", json_schema=str(path)))
        accept = JsonFilter(str(path))
        for text in ("{}", '{"a": "aa", "b": 1e5, "c": 0.07, "d": [1]}', "[1e999]", "1", '"a"', '{"b": 1e400}'):
            accept(text)

    return what, lambda: said(read)


def index(draw: random.Random, folder: Path, canary: Path) -> tuple[str, Read]:
    from safetensors.torch import save_file

    for number in range(2):
        save_file({f"t{number}": torch.zeros(2)}, folder / f"model-{number}.safetensors")
    path = folder / INDEX
    described = {f"t{number}": f"model-{number}.safetensors" for number in range(2)}
    path.write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": described}))
    what = damage(draw, path, canary)

    def read() -> None:
        weights = Weights(folder, torch.float32)
        for name in described:
            if name in weights:
                weights.take(name)

    return what, lambda: said(read)


def digest(draw: random.Random, folder: Path, canary: Path) -> tuple[str, Read]:
    """What is kept of a file's hash."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPDECODE_CACHE", str(folder / "cache"))
        file = folder / "weights"
        file.write_text("weights")
        patch.setattr("engine.checkpoints.digests.SETTLED_AFTER_S", -1.0)
        wanted = file_digest(file)
        [kept] = (folder / "cache/digests").iterdir()
    [state, _] = json.loads(kept.read_bytes())
    what = damage(draw, kept, canary)

    def read() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SKIPDECODE_CACHE", str(folder / "cache"))
            found = file_digest(file)
        if found != wanted:  # one that is well-formed and of this file is believed
            assert json.loads(kept.read_bytes()) == [state, found]
            assert re.fullmatch("[0-9a-f]{64}", found)
        return ""

    return what, read


PARTS: dict[str, Part] = {
    "schedule": a_schedule,
    "training's checkpoint": a_checkpoint,
    "batch requests": requests,
    "row's messages": messages,
    "solved rivals": rivals,
    "study's outputs": study,
    "configuration": config,
    "JSON schema": schema,
    "index of weights": index,
    "kept digest": digest,
}
