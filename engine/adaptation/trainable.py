"""What schedules bring along, as parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from engine.adaptation.recipe import Recipe
from engine.errors import ScheduleError
from engine.forward.compiled_parts import compile_bridge, compile_head, compile_prompt_bridge
from engine.forward.operations import Compiled
from engine.kernels import Kernels
from engine.models.decoder import Decoder
from engine.parts.adapter import Adapter, silent_adapter
from engine.parts.bridge import GATED, Bridge
from engine.parts.part import rounded
from engine.parts.prompt_bridge import ROLES, WITHIN, PromptBridge
from engine.parts.unit import Unit, all_units
from engine.schedules.schedule import Schedule

Part = TypeVar("Part", Bridge, PromptBridge, Adapter)


class Trainable:
    """What schedules bring as float32 parameters, `<part>/<role>`; a part that several of them bring is one.

    What they lack of the parts asked for is added so that it changes nothing yet.
    """

    def __init__(self, schedules: Sequence[Schedule], decoder: Decoder, device: torch.device, recipe: Recipe) -> None:
        """Starts where the schedules are; the decoder has kernels that gradients pass."""
        self.starts = with_added(schedules, decoder, recipe)
        self._decoder, self._device = decoder, device
        previews = {schedule.head_preview for schedule in schedules}  # to judge by; they are not trained
        with torch.no_grad():
            self._heads = {
                each: compile_head(each, decoder, Kernels(), torch.float32, device) for each in previews if each
            }
        self._parts = {part: str(number) for number, part in enumerate(parts_of(self.starts))}
        self.parameters = {
            f"{name}/{role}": nn.Parameter(tensor.detach().to(device, torch.float32).clone())
            for part, name in self._parts.items()
            for role, tensor in part.tensors.items()
        }

    def paced(self) -> dict[float, list[nn.Parameter]]:
        """The parameters by the share of the learning rate that they take."""
        paced: dict[float, list[nn.Parameter]] = {}
        for part, name in self._parts.items():
            paced.setdefault(self._pace(part), []).extend(self.parameters[f"{name}/{role}"] for role in part.tensors)
        return paced

    def affine_maps(self) -> dict[str, tuple[int, bool]]:
        """Affine maps of a state, by the parameter that multiplies it: the place of the states that each takes, and
        whether it gives such a state again, as bridges do, and not keys and values.
        """
        found: dict[str, tuple[int, bool]] = {}
        for part, name in self._parts.items():
            if isinstance(part, Bridge) and "weight" in part.tensors:
                found[f"{name}/weight"] = part.block.first.place, True
            elif isinstance(part, PromptBridge):
                places = {ROLES[0]: 2 * part.first, WITHIN[0]: part.first_place}
                found |= {f"{name}/{role}": (place, False) for role, place in places.items() if role in part.tensors}
        return found

    def _pace(self, part: Bridge | PromptBridge | Adapter) -> float:
        # What bridges change adds up: at a whole step each, four at once first undo what their closed form has fitted.
        together = (start.bridges_on(i) for start in self.starts for i in range(len(start.plateaus)))
        return 1 / max((len(bridges) for bridges in together if part in bridges), default=1)

    def compiled(self, schedule: Schedule) -> Compiled:
        """What the parts of one of `starts` are to do now; gradients flow to the parameters."""
        where = Kernels(), torch.float32, self._device
        bridges = {
            bridge: compile_bridge(self._now(bridge, self.parameters), *where) for bridge in schedule.all_bridges
        }
        adapted, maps = {}, {}
        if schedule.adapter is not None:
            adapted[schedule.adapter] = self._decoder.adapted(self._now(schedule.adapter, self.parameters), merge=False)
        if schedule.prompt_bridge is not None:
            now = self._now(schedule.prompt_bridge, self.parameters)
            maps[schedule.prompt_bridge] = compile_prompt_bridge(now, self._decoder.shape, *where)
        return Compiled(bridges, adapted, self._heads, maps)

    def schedules(self) -> list[Schedule]:
        """`starts` with their parts as they are now, rounded as they are stored."""
        values = {name: rounded(parameter.detach()).cpu() for name, parameter in self.parameters.items()}
        return [
            replace(
                start,
                bridges={name: self._now(bridge, values) for name, bridge in start.bridges.items()},
                prompt_bridge=start.prompt_bridge and self._prompts_now(start.prompt_bridge, values),
                adapter=start.adapter and self._now(start.adapter, values),
            )
            for start in self.starts
        ]

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the parameters to what `snapshot` gave."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])

    def _now(self, part: Part, values: Mapping[str, Tensor]) -> Part:
        """A part of `starts` with these values, named like the parameters."""
        return replace(part, tensors={role: values[f"{self._parts[part]}/{role}"] for role in part.tensors})

    def _prompts_now(self, bridge: PromptBridge, values: Mapping[str, Tensor]) -> PromptBridge:
        """The same of a prompt bridge, with what prompts skip a block by."""
        return replace(self._now(bridge, values), skips=bridge.skips and self._now(bridge.skips, values))


def with_added(schedules: Sequence[Schedule], decoder: Decoder, recipe: Recipe) -> list[Schedule]:
    """Schedules with what a recipe adds to them: gates to bridges without one, an adapter to schedules without one.

    It is of the units that decode tokens of some of them run where the first bridge of each has been passed; where
    prompts are bridged, of all units that tokens run, for prompts too.
    """
    draw = torch.Generator().manual_seed(recipe.seed)
    gated: dict[Bridge, Bridge] = {}
    for bridge in dict.fromkeys(bridge for schedule in schedules for bridge in schedule.bridges.values()):
        gate = _silent_gate(bridge.hidden, recipe.gate_width, draw) if recipe.gate_width else {}
        gated[bridge] = replace(bridge, tensors={**gate, **bridge.tensors})
    bridged = any(schedule.prompt_bridge for schedule in schedules)
    projections = {unit: decoder.projections(unit) for unit in (_run(schedules) if bridged else _above(schedules))}
    is_added = recipe.adapter_rank and projections
    adapter = silent_adapter(projections, recipe.adapter_rank, recipe.seed, bridged) if is_added else None
    return [
        replace(
            schedule,
            bridges={name: gated[bridge] for name, bridge in schedule.bridges.items()},
            adapter=schedule.adapter or adapter,
        )
        for schedule in schedules
    ]


def parts_of(schedules: Sequence[Schedule]) -> list[Bridge | PromptBridge | Adapter]:
    """What is trained of them, each once."""
    parts = (part for each in schedules for part in (*each.all_bridges, each.prompt_bridge, each.adapter))
    return [part for part in dict.fromkeys(parts) if part is not None]


def check_parts(schedules: Sequence[Schedule], adapter_rank: int) -> None:
    """Raises ScheduleError unless there is something to train: what schedules bring, or an adapter of such a rank."""
    if not (parts_of(schedules) or (adapter_rank and _above(schedules))):
        raise ScheduleError("the schedule has no bridges, and there is nothing to adapt, or adapter_rank is 0")


def _above(schedules: Sequence[Schedule]) -> list[Unit]:
    """Units that some of them run, in running order, from where all of them have changed something."""
    place = max(schedule.changed_from for schedule in schedules)
    return [unit for unit in _run(schedules) if unit.place >= place]


def _run(schedules: Sequence[Schedule]) -> list[Unit]:
    """Units that some of them run for decode tokens or prompts, in running order."""
    run = {unit for schedule in schedules for unit in schedule.active_units(0)}
    layers = {layer for each in schedules if each.prompt_bridge for layer in each.prompt_bridge.run_layers}
    return [unit for unit in all_units(schedules[0].layers) if unit in run or unit.layer in layers]


def _silent_gate(hidden: int, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """A gated part that adds nothing yet: only its last matrix is zero, so that gradients reach all three in time."""
    gate, up, down = GATED
    return {
        gate: torch.randn(hidden, width, generator=draw) * hidden**-0.5,
        up: torch.randn(hidden, width, generator=draw) * hidden**-0.5,
        down: torch.zeros(width, hidden),
    }
