"""What a pass over the layers does: a short list of operations.

Decoding, the FLOP ledger and every other forward under a schedule read this one list.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.bridge import Bridge
from engine.schedule import Schedule
from engine.unit import Unit, all_units


class RunUnit(NamedTuple):
    """Run an attention or MLP block with its residual connection."""

    unit: Unit


class ApplyBridge(NamedTuple):
    """Map the hidden state in place of the bridge's block."""

    bridge: Bridge


Operation = RunUnit | ApplyBridge


def prompt_plan(schedule: Schedule) -> tuple[Operation, ...]:
    """What prompt tokens go through: full depth."""
    return tuple(map(RunUnit, all_units(schedule.layers)))


def decode_plan(schedule: Schedule, plateau: int) -> tuple[Operation, ...]:
    """What decode tokens go through on a plateau, in order: active units, and a bridge where its block would start."""
    skipped = schedule.skipped_units(plateau)
    starts = {bridge.block.first: bridge for bridge in schedule.bridges_on(plateau)}
    plan: list[Operation] = []
    for unit in all_units(schedule.layers):
        if unit in starts:
            plan.append(ApplyBridge(starts[unit]))
        elif unit not in skipped:
            plan.append(RunUnit(unit))
    return tuple(plan)


def run_units(plan: tuple[Operation, ...]) -> tuple[Unit, ...]:
    """The units that a plan runs, in order."""
    return tuple(operation.unit for operation in plan if isinstance(operation, RunUnit))
