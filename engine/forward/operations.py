"""What a pass over the layers does: a short list of operations.

Decoding and every other forward under a schedule read this one list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from engine.forward.compiled_parts import BridgeMap, Head, PromptMaps
from engine.models.decoder import Attend, Decoder, Rotations
from engine.parts.adapter import Adapter
from engine.parts.bridge import Bridge
from engine.parts.head_preview import HeadPreview
from engine.parts.prompt_bridge import PromptBridge
from engine.parts.unit import Unit, all_units
from engine.schedules.schedule import Schedule


class RunUnit(NamedTuple):
    """Run an attention or MLP block with its residual connection."""

    unit: Unit
    adapter: Adapter | None = None  # changes its matrices


class ApplyBridge(NamedTuple):
    """Map the hidden state in place of the bridge's block, or between units where that is empty."""

    bridge: Bridge


Operation = RunUnit | ApplyBridge


@dataclass(frozen=True)
class Compiled:
    """What schedules bring along, ready to run on a device."""

    bridges: Mapping[Bridge, BridgeMap] = field(default_factory=dict)
    adapted: Mapping[Adapter, Decoder] = field(default_factory=dict)  # the model with each adapter's changes
    heads: Mapping[HeadPreview, Head] = field(default_factory=dict)
    prompt_maps: Mapping[PromptBridge, PromptMaps] = field(default_factory=dict)

    def model(self, operation: RunUnit, base: Decoder) -> Decoder:
        """The one to run a unit of."""
        return base if operation.adapter is None else self.adapted[operation.adapter]

    def head(self, schedule: Schedule, base: Decoder) -> Head:
        """What gives decode tokens their logits."""
        return base.logits if schedule.head_preview is None else self.heads[schedule.head_preview]


Observe = Callable[[int, Tensor], None]  # place of a unit, hidden states before it


def decode_plan(schedule: Schedule, plateau: int) -> tuple[Operation, ...]:
    """What decode tokens go through on a plateau, in order: active units, and a bridge where its block would start."""
    skipped = schedule.skipped_units(plateau)
    starts = {bridge.block.first: bridge for bridge in schedule.bridges_on(plateau)}
    plan: list[Operation] = []
    for unit in all_units(schedule.layers):
        if unit in starts:
            plan.append(ApplyBridge(starts[unit]))
        if unit not in skipped:
            plan.append(RunUnit(unit, schedule.adapter_of(unit)))
    return tuple(plan)


def run_plan(
    decoder: Decoder,
    plan: Sequence[Operation],
    compiled: Compiled,
    x: Tensor,
    rotations: Rotations,
    attend: Attend,
    observe: Observe | None = None,
) -> Tensor:
    """Hidden states [N, hidden] after a plan's operations.

    Args:
        compiled: the plan's bridges and adapted units, on x's device.
        x: hidden states [N, hidden] before them.
        rotations, attend: of the N tokens, as `Decoder.attention` takes them.
        observe: called with the place of each unit that runs and the hidden states before it. It must not change them.
    """
    for operation in plan:
        if isinstance(operation, RunUnit) and observe is not None:
            observe(operation.unit.place, x)
        if isinstance(operation, ApplyBridge):
            x = compiled.bridges[operation.bridge](x)
        elif operation.unit.kind == "a":
            x = compiled.model(operation, decoder).attention(operation.unit.layer, x, rotations, attend)
        else:
            x = compiled.model(operation, decoder).mlp(operation.unit.layer, x)
    return x
