"""Adapters: kept beside their schedule, refused where they do not fit. What they compute: test_scheduled_decoding."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import Engine, Ledger, Sampling, Schedule, ScheduleError
from engine.parts.adapter import Adapter, silent_adapter
from engine.parts.unit import Unit
from engine.schedules.schedule_file import ADAPTER_FILE, write_tensors
from tests.engine.adapters import random_adapter
from tests.engine.prompts import random_prompts

UNITS = (Unit("a", 2), Unit("m", 3))


@pytest.fixture(scope="module")
def engine(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint()), device="cpu")


@pytest.fixture
def schedule(engine: Engine) -> Schedule:
    return replace(Schedule.full_depth(engine.shape.layers), adapter=random_adapter(engine.decoder, UNITS))


def tokens(engine: Engine, schedule: Schedule | None) -> dict[int, tuple[int, ...]]:
    prompts = random_prompts([3, 9, 14, 20, 26])
    sampling = Sampling(max_new_tokens=12, min_new_tokens=12)
    return {generation.index: generation.tokens for generation in engine.generate(prompts, sampling, schedule)}


def test_a_schedule_file_keeps_its_adapter(engine: Engine, schedule: Schedule, tmp_path: Path) -> None:
    schedule.write(tmp_path)
    again = Schedule.read(tmp_path)
    assert again == schedule
    assert again.adapter is not None
    assert again.adapter.changes.keys() == set(UNITS)
    assert again.first_place == UNITS[0].place
    assert not again.is_full_depth
    assert tokens(engine, again) == tokens(engine, schedule)


def test_only_decode_tokens_are_changed_and_no_flops(engine: Engine, schedule: Schedule) -> None:
    base, changed = tokens(engine, None), tokens(engine, schedule)
    assert all(base[index][0] == changed[index][0] for index in base)  # the first token comes from the prompt pass
    assert base != changed
    assert tokens(engine, None) == base
    plain = replace(schedule, adapter=None)
    for depth in (Ledger(engine.shape, schedule), Ledger(engine.shape, plain)):
        assert depth.decode(20, 9) == Ledger(engine.shape, plain).decode(20, 9)


def test_one_that_changes_prompts_is_another_and_costs_no_flops_either(
    engine: Engine, schedule: Schedule, tmp_path: Path
) -> None:
    assert schedule.adapter is not None
    both = replace(schedule, adapter=replace(schedule.adapter, changes_prompts=True))
    assert both != schedule
    base, changed = tokens(engine, None), tokens(engine, both)
    assert any(base[index][0] != changed[index][0] for index in base)
    assert Ledger(engine.shape, both).prompt(20) == Ledger(engine.shape, schedule).prompt(20)
    both.write(tmp_path)
    assert Schedule.read(tmp_path) == both
    file = tmp_path / "schedule.json"
    file.write_text(file.read_text().replace('"prompts": true,', ""))
    with pytest.raises(ScheduleError, match="the tensors of the adapter are not those"):
        Schedule.read(tmp_path)


def test_schedules_whose_adapters_change_prompts_have_a_pass_of_their_own(engine: Engine, schedule: Schedule) -> None:
    assert schedule.adapter is not None
    both = replace(schedule, adapter=replace(schedule.adapter, changes_prompts=True))
    schedules, prompts = [None, schedule, both], random_prompts([5, 9, 14])
    sampling = Sampling(max_new_tokens=8, min_new_tokens=8)
    found = sorted(engine.generate_each(prompts, sampling, schedules), key=lambda each: (each[0], each[1].index))
    alone = [
        (index, generation)
        for index, each in enumerate(schedules)
        for generation in sorted(engine.generate(prompts, sampling, each), key=lambda one: one.index)
    ]
    assert [(index, each.tokens) for index, each in found] == [(index, each.tokens) for index, each in alone]


def test_a_silent_adapter_changes_nothing(engine: Engine, schedule: Schedule) -> None:
    sizes = {unit: engine.decoder.projections(unit) for unit in UNITS}
    silent = replace(schedule, adapter=silent_adapter(sizes, rank=4, seed=0))
    assert tokens(engine, silent) == tokens(engine, None)


def test_an_adapted_model_shares_what_is_left_alone(engine: Engine, schedule: Schedule) -> None:
    assert schedule.adapter is not None
    projections = engine.decoder._projections
    for merge in (True, False):
        changed = engine.decoder.adapted(schedule.adapter, merge)._projections
        shared = [a is b for a, b in zip(projections.attention, changed.attention, strict=True)]
        assert shared == [layer != 2 for layer in range(engine.shape.layers)]
        assert [a is b for a, b in zip(projections.mlp, changed.mlp, strict=True)].count(False) == 1


def test_what_a_schedule_brings_is_made_once_whatever_runs_at_full_depth_in_between(
    engine: Engine, schedule: Schedule
) -> None:
    first = engine.compiled(schedule)
    assert not engine.compiled(Schedule.full_depth(engine.shape.layers)).adapted
    assert engine.compiled(schedule).adapted[schedule.adapter] is first.adapted[schedule.adapter]


def test_a_lost_damaged_or_exchanged_file_is_named(engine: Engine, schedule: Schedule, tmp_path: Path) -> None:
    schedule.write(tmp_path)
    file = tmp_path / ADAPTER_FILE
    write_tensors(file, random_adapter(engine.decoder, UNITS, seed=1).tensors)
    with pytest.raises(ScheduleError, match="the tensors of the adapter are not those"):
        Schedule.read(tmp_path)
    write_tensors(file, {})
    with pytest.raises(ScheduleError, match="changes nothing: leave it out"):
        Schedule.read(tmp_path)
    file.write_bytes(b"no tensors")
    with pytest.raises(ScheduleError, match=f"{ADAPTER_FILE}.*belongs beside"):
        Schedule.read(tmp_path)
    file.unlink()
    with pytest.raises(ScheduleError, match=f"{ADAPTER_FILE}.*belongs beside"):
        Schedule.read(tmp_path)
    with pytest.raises(ScheduleError, match="belongs beside"):
        Schedule.from_dict(json.loads((tmp_path / "schedule.json").read_text()))


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({}, "changes nothing"),
        ({"a2.q.down": (32, 2)}, "needs down and up"),
        ({"a2.q.up": (2, 32)}, "has no down"),
        ({"a2.q.down": (32, 2), "a2.q.up": (3, 32)}, r"needs down and up, got \[\[32, 2\], \[3, 32\]\]"),
        ({"a2.q": (32, 2)}, "named like 'a16.q.down'"),
        ({"x2.q.down": (32, 2)}, "is not a unit"),
    ],
)
def test_tensors_that_are_no_adapter(tensors: dict[str, tuple[int, ...]], complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        Adapter({name: torch.zeros(shape) for name, shape in tensors.items()})


def test_numbers_that_are_none() -> None:
    with pytest.raises(ScheduleError, match="no finite number"):
        Adapter({"a2.q.down": torch.full((32, 1), torch.nan), "a2.q.up": torch.zeros(1, 32)})


@pytest.mark.parametrize(
    ("name", "outputs", "complaint"),
    [
        ("a7.q", 32, "changes a7, but the model ends at layer"),
        ("a2.up", 32, "that unit's projections are q, k, v, o"),
        ("a2.q", 31, "is of 32 inputs and 31 outputs, the model's of 32 and 32"),
    ],
)
def test_an_adapter_of_another_model_is_refused_before_any_batch(
    engine: Engine, schedule: Schedule, name: str, outputs: int, complaint: str
) -> None:
    foreign = Adapter({f"{name}.down": torch.ones(32, 1), f"{name}.up": torch.ones(1, outputs)})
    with pytest.raises(ScheduleError, match=complaint):
        engine.generate([[1, 2, 3]], Sampling(max_new_tokens=3), replace(schedule, adapter=foreign))
