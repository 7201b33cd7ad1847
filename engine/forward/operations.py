"""What a pass over the layers does under a schedule: decoding and every other forward read it here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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


Operation = RunUnit | Bridge  # which maps the hidden state in place of its block, or between units where that is empty


class UnitPlan(NamedTuple):
    """What decode tokens go through at a unit's place."""

    run: RunUnit
    plateaus: int  # that run it: the first ones
    before: Sequence[Bridge | None]  # what tokens of each plateau go through first


def unit_plans(schedule: Schedule) -> list[UnitPlan]:
    """Of all units, in running order."""
    plateaus = range(len(schedule.plateaus))
    skipped = [schedule.skipped_units(plateau) for plateau in plateaus]
    changed = schedule.adapter.changes if schedule.adapter else {}
    starts = [{each.block.first: each for each in schedule.bridges_on(plateau)} for plateau in plateaus]
    return [
        UnitPlan(
            RunUnit(unit, schedule.adapter if unit in changed else None),
            sum(unit not in units for units in skipped),
            [bridges.get(unit) for bridges in starts],
        )
        for unit in all_units(schedule.layers)
    ]


@dataclass(frozen=True)
class Compiled:
    """What schedules bring along, ready to run on a device."""

    bridges: Mapping[Bridge, BridgeMap] = field(default_factory=dict)
    adapted: Mapping[Adapter, Decoder] = field(default_factory=dict)  # the model with each adapter's changes
    heads: Mapping[HeadPreview, Head] = field(default_factory=dict)
    prompt_maps: Mapping[PromptBridge, PromptMaps] = field(default_factory=dict)

    def model(self, adapter: Adapter | None, base: Decoder) -> Decoder:
        """The one with an adapter's changes."""
        return base if adapter is None else self.adapted[adapter]

    def head(self, schedule: Schedule, base: Decoder) -> Head:
        """What gives decode tokens their logits."""
        return base.logits if schedule.head_preview is None else self.heads[schedule.head_preview]


Observe = Callable[[int, Tensor], None]  # place of a unit, hidden states before it, which must not be changed


def run_units(
    decoder: Decoder,
    units: Iterable[Unit],
    x: Tensor,
    rotations: Rotations,
    attend: Attend,
    observe: Observe | None = None,
) -> Tensor:
    """Hidden states [N, hidden] after units, of x before them; `rotations` and `attend` as for `Decoder.attention`."""
    for unit in units:
        if observe is not None:
            observe(unit.place, x)
        x = decoder.attention(unit.layer, x, rotations, attend) if unit.kind == "a" else decoder.mlp(unit.layer, x)
    return x
