"""Rivals that are given bridges have one for every skipped block, and meet their target with them."""

from __future__ import annotations

import torch

from engine import Block, Bridge, Engine, Sampling, Schedule, decode_flop_speedup
from engine.schedules import decays, orders
from pipeline.evaluation.bridged_rivals import attach, bridged_rivals
from pipeline.evaluation.rivals import RivalCalibration


def test_every_skipped_block_of_every_plateau_is_bridged() -> None:
    order = orders.of_layers([3, 5, 4, 8])
    schedule = Schedule.build(10, order, decays.linear(0, 4, 4), horizon=4)
    zeros = torch.zeros(8, 8), torch.zeros(8)
    bridged = attach(schedule, lambda block: Bridge.affine(Block.of_layers(*block), *zeros))
    assert [plateau.bridges for plateau in bridged.plateaus] == [
        (), ("3-4",), ("3-4", "5-6"), ("3-6",), ("3-6", "8-9"),
    ]  # fmt: skip
    assert bridged.skip_order == schedule.skip_order


def test_they_meet_their_target_with_their_bridges_counted(packaged: Engine, texts: list[str]) -> None:
    prompts = [packaged.tokenizer.encode_chat(text) for text in sorted(texts, key=len)[:6]]
    calibration = RivalCalibration.measure(packaged, Sampling(max_new_tokens=16), prompts)
    found = list(bridged_rivals([1.3], calibration))
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
