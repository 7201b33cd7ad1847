"""Rivals that are given bridges have one for every skipped block, and meet their target with them; those for the whole
sample reach it with all that they bring, and a pruned model has the same layers for all."""

import pytest
import torch

from engine import Block, Bridge, Engine, Sampling, Schedule, ScheduleError, decode_flop_speedup
from engine.forward.target import sample_flop_speedup
from engine.parts.unit import Unit
from engine.schedules import decays, orders
from pipeline.evaluation.bridged_rivals import attach, bridged_rivals, whole_sample_rivals
from pipeline.evaluation.rivals import RivalCalibration

TARGET = 1.5


@pytest.fixture(scope="module")
def calibration(packaged: Engine, texts: list[str]) -> RivalCalibration:
    prompts = [packaged.tokenizer.encode_chat(text) for text in sorted(texts, key=len)[:6]]
    return RivalCalibration.measure(packaged, Sampling(max_new_tokens=16), prompts)


def test_every_skipped_block_of_every_plateau_is_bridged() -> None:
    order = orders.of_layers([3, 5, 4, 8])
    schedule = Schedule.build(10, order, decays.linear(0, 4, 4), horizon=4)
    zeros = torch.zeros(8, 8), torch.zeros(8)
    bridged = attach(schedule, lambda block: Bridge.affine(Block.of_layers(*block), *zeros))
    assert [plateau.bridges for plateau in bridged.plateaus] == [
        (), ("3-4",), ("3-4", "5-6"), ("3-6",), ("3-6", "8-9"),
    ]  # fmt: skip
    assert bridged.skip_order == schedule.skip_order


def test_they_meet_their_target_with_their_bridges_counted(packaged: Engine, calibration: RivalCalibration) -> None:
    found = bridged_rivals([1.3], calibration)
    assert [rival.name for rival in found] == [
        "early termination, bridged", "Unified Layer Skipping, bridged", "SkipDecode, bridged",
    ]  # fmt: skip
    schedules = []
    for rival in found:
        assert isinstance(rival.method, Schedule)
        assert rival.method.head_preview
        assert decode_flop_speedup(packaged.shape, rival.method, calibration.lengths) >= 1.3
        bare = Schedule(30, rival.method.skip_order, tuple(p._replace(bridges=()) for p in rival.method.plateaus))
        schedules += [rival.method, bare]
    # On the very answers they were fitted on bridges help each of them.
    kl = calibration.kl(schedules)
    for bridged, bare in zip(kl[::2], kl[1::2], strict=True):
        assert bridged < 0.5 * bare


def test_sums_that_do_not_fit_the_memory_are_refused_before_they_are_made(
    calibration: RivalCalibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.evaluation.bridged_rivals.free_bytes", lambda _: 20_000_000)
    monkeypatch.setattr("pipeline.evaluation.bridged_rivals.collect_moments", lambda *_, **__: pytest.fail("made"))
    with pytest.raises(ScheduleError, match=r"takes 0\.\d GB beside the model, and 0\.0 GB are free: ask for fewer"):
        bridged_rivals([1.3], calibration)


def test_all_reach_the_same_speedup_of_the_whole_sample(packaged: Engine, calibration: RivalCalibration) -> None:
    found = {rival.name: rival for rival in whole_sample_rivals(TARGET, [1.3], calibration)}
    assert list(found) == [
        "early termination, bridged", "Unified Layer Skipping, bridged", "SkipDecode, bridged",
        "prompts alone", "pruned",
    ]  # fmt: skip
    for rival in found.values():
        assert isinstance(rival.method, Schedule)
        assert rival.method.prompt_bridge
        assert rival.method.head_preview
        # A layer more or less is a thirtieth.
        assert TARGET <= sample_flop_speedup(packaged.shape, rival.method, calibration.lengths) < 1.05 * TARGET
    alone, pruned = found["prompts alone"].method, found["pruned"].method
    assert isinstance(alone, Schedule)
    assert isinstance(pruned, Schedule)
    assert alone.plateaus[-1].skipped == 0
    assert pruned.prompt_bridge
    gone = {Unit(kind, layer) for layer in pruned.prompt_bridge.skipped_layers for kind in "am"}
    assert gone == pruned.skipped_units(0) == set(pruned.prompt_bridge.skipped_units)
    assert pruned.prompt_bridge.layers == 29 - len(pruned.prompt_bridge.skipped_layers)


def test_one_that_cannot_reach_it_is_left_out(calibration: RivalCalibration, caplog: pytest.LogCaptureFixture) -> None:
    assert list(whole_sample_rivals(40.0, [], calibration)) == []
    assert "prompts alone is left out: it cannot reach 40x of the whole sample" in caplog.text
    assert "pruned is left out" in caplog.text
