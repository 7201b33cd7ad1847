"""A training goes on from its checkpoint as if never interrupted, and from no other and no damaged one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine import Engine, Schedule, ScheduleError
from engine.adaptation.curve import Point
from engine.forward.teacher_forcing import Answer
from engine.parts.part import digest_of
from tests.engine.adaptation.training import RECIPE, train, trainer_of
from tests.engine.conftest import random_prompt_bridge


@pytest.mark.parametrize(("adapter_rank", "together"), [(0, False), (3, False), (3, True)])
def test_a_killed_training_goes_on_to_the_same_curve(
    engine: Engine,
    schedule: Schedule,
    deeper: Schedule,
    answers: list[Answer],
    tmp_path: Path,
    adapter_rank: int,
    together: bool,
) -> None:
    recipe = replace(RECIPE, adapter_rank=adapter_rank)
    schedules = [schedule, deeper] if together else [schedule]
    whole, killed, resumed = (trainer_of(engine, schedules, answers, recipe) for _ in range(3))
    points = list(whole.run())
    checkpoint = tmp_path / "training.safetensors"
    for point in killed.run(checkpoint):
        if point.step > 20:
            break  # after this step's judgement, before its checkpoint
    again = list(resumed.run(checkpoint))

    def curve(points: list[Point]) -> list[tuple[int, float | None, float, float]]:
        return [(p.step, p.loss, p.kl, p.agreement) for p in points]

    assert curve(again) == curve(points)
    assert [best for best, _ in resumed.best()] == [best for best, _ in whole.best()]


def test_a_checkpoint_of_an_earlier_version_whose_curve_begins_with_a_loss_goes_on_to_the_same_curve(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path
) -> None:
    checkpoint, recipe = tmp_path / "training.safetensors", replace(RECIPE, steps=10)
    _, points = train(engine, schedule, answers, recipe, checkpoint)
    with safe_open(checkpoint, "pt") as file:
        state = json.loads(file.metadata()["state"])
    assert state["curve"][0][1] is None
    state["curve"][0][1], tensors = state["curve"][0][2], load_file(checkpoint)
    said = json.dumps(state)
    save_file(tensors, checkpoint, {"state": said, "digest": digest_of(said, sorted(tensors.items()))})
    assert train(engine, schedule, answers, recipe, checkpoint)[1] == points


def test_a_prompt_bridge_that_was_fitted_anew_on_another_machine_goes_on(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path
) -> None:
    bridge = random_prompt_bridge(engine.shape, 3)
    last_bits = {role: tensor.nextafter(tensor + 1) for role, tensor in bridge.tensors.items()}
    begun, again = (replace(schedule, prompt_bridge=each) for each in (bridge, replace(bridge, tensors=last_bits)))
    recipe, checkpoint = replace(RECIPE, steps=10), tmp_path / "training.safetensors"
    first, _ = train(engine, begun, answers, recipe, checkpoint)
    second, _ = train(engine, again, answers, recipe, checkpoint)
    assert [best for best, _ in second.best()] == [best for best, _ in first.best()]


def test_a_checkpoint_of_another_training_is_refused(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "training.safetensors"
    recipe = replace(RECIPE, steps=10)
    train(engine, schedule, answers, recipe, checkpoint)
    with pytest.raises(ScheduleError, match="of another training"):
        train(engine, schedule, answers, replace(recipe, learning_rate=1e-4), checkpoint)
    other = [*answers[:9], *answers[10:], answers[9]]
    with pytest.raises(ScheduleError, match="of another training"):
        train(engine, schedule, other, recipe, checkpoint)
    checkpoint.write_bytes(b"no tensors")
    with pytest.raises(ScheduleError, match="delete it to start anew"):
        train(engine, schedule, answers, recipe, checkpoint)


@pytest.mark.parametrize(
    "damage",
    [{"seconds": 10**400}, {"seconds": True}, {"seconds": "1"}, {"curve": {}}],
    ids=["beyond any float", "a truth", "a text", "no list"],
)
def test_a_checkpoint_whose_state_is_no_state_is_damaged(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path, damage: dict[str, object]
) -> None:
    checkpoint, recipe = tmp_path / "training.safetensors", replace(RECIPE, steps=10)
    train(engine, schedule, answers, recipe, checkpoint)
    with safe_open(checkpoint, "pt") as file:
        metadata = file.metadata()
    state = json.dumps(json.loads(metadata["state"]) | damage)
    save_file(load_file(checkpoint), checkpoint, metadata | {"state": state})
    with pytest.raises(ScheduleError, match="delete it to start anew"):
        train(engine, schedule, answers, recipe, checkpoint)


def test_a_full_disk_is_an_error_of_the_disk(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path
) -> None:
    (tmp_path / ".training.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        train(engine, schedule, answers, replace(RECIPE, steps=10), tmp_path / "training.safetensors")


def test_a_checkpoint_with_a_bit_of_a_tensor_flipped_or_without_a_digest_is_damaged(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path
) -> None:
    checkpoint, recipe = tmp_path / "training.safetensors", replace(RECIPE, steps=10)
    train(engine, schedule, answers, recipe, checkpoint)
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ScheduleError, match=r"digest .* delete it to start anew"):
        train(engine, schedule, answers, recipe, checkpoint)
    checkpoint.write_bytes(whole.replace(b'"digest":', b'"digust":', 1))
    with pytest.raises(ScheduleError, match=r"digest .* delete it to start anew"):
        train(engine, schedule, answers, recipe, checkpoint)
    checkpoint.write_bytes(whole)
    train(engine, schedule, answers, recipe, checkpoint)
