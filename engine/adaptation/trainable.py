"""What a schedule brings along, as parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.adapter import Adapter, silent_adapter
from engine.bridge import GATED
from engine.decoder import Decoder
from engine.kernels import Kernels
from engine.plan import Compiled
from engine.prompt_bridge import PromptBridge, PromptMaps
from engine.schedule import Schedule

BRIDGES, PROMPTS, ADAPTER = "bridges", "prompts", "adapter"


class Trainable:
    """What a schedule brings as float32 parameters: `bridges/<bridge>/<role>`, `prompts/<role>`, `adapter/<tensor>`.

    What the schedule lacks of the parts asked for is added so that it changes nothing yet.
    """

    def __init__(
        self,
        schedule: Schedule,
        decoder: Decoder,
        device: torch.device,
        gate_width: int = 0,
        adapter_rank: int = 0,
        seed: int = 0,
    ) -> None:
        """Starts where the schedule is.

        Args:
            schedule: with bridges of any kind.
            decoder: the model, with plain kernels.
            device: that it is on.
            gate_width: of a gated part for every bridge without one; 0 for none.
            adapter_rank: of an adapter of all units that decode tokens run from the first bridge on; 0 for none.
            seed: of what is added.
        """
        draw = torch.Generator().manual_seed(seed)
        bridges = {}
        for name, bridge in schedule.bridges.items():
            gated = not gate_width or GATED[0] in bridge.tensors
            gate = {} if gated else _silent_gate(bridge.hidden, gate_width, draw)
            bridges[name] = replace(bridge, tensors={**bridge.tensors, **gate})
        adapter = schedule.adapter
        if adapter is None and adapter_rank:
            above = [unit for unit in schedule.active_units(0) if unit.place >= schedule.changed_from]
            adapter = silent_adapter({unit: decoder.projections(unit) for unit in above}, adapter_rank, seed)
        self.start = replace(schedule, bridges=bridges, adapter=adapter)
        self._decoder, self._device = decoder, device
        preview = schedule.head_preview  # to judge by; it is not trained
        with torch.no_grad():
            self._heads = {preview: preview.compiled(decoder, Kernels(), torch.float32, device)} if preview else {}
        named = {
            f"{BRIDGES}/{name}/{role}": tensor
            for name, bridge in bridges.items()
            for role, tensor in bridge.tensors.items()
        }
        prompts = schedule.prompt_bridge.tensors if schedule.prompt_bridge else {}
        named |= {f"{PROMPTS}/{role}": tensor for role, tensor in prompts.items()}
        named |= {f"{ADAPTER}/{name}": tensor for name, tensor in (adapter.tensors if adapter else {}).items()}
        self.parameters = {
            name: nn.Parameter(tensor.detach().to(device, torch.float32).clone()) for name, tensor in named.items()
        }

    def some(self, prompts: bool) -> list[nn.Parameter]:
        """Those of the prompt bridge, or all others."""
        return [value for name, value in self.parameters.items() if name.startswith(f"{PROMPTS}/") == prompts]

    def compiled(self, kernels: Kernels) -> Compiled:
        """What the parts of `start` are to do now; gradients flow to the parameters."""
        now = self._with(self.parameters)
        bridges = {
            bridge: now.bridges[name].compiled(kernels, torch.float32, self._device)
            for name, bridge in self.start.bridges.items()
        }
        adapted = {}
        if self.start.adapter is not None and now.adapter is not None:
            adapted[self.start.adapter] = self._decoder.adapted(now.adapter, merge=False)
        return Compiled(bridges, adapted, self._heads)

    def prompt_maps(self, kernels: Kernels) -> PromptMaps | None:
        """What the prompt bridge is to do now, if there is one; gradients flow to its parameters."""
        bridge = self._prompt_bridge(self.parameters)
        return None if bridge is None else bridge.compiled(self._decoder.shape, kernels, torch.float32, self._device)

    def schedule(self) -> Schedule:
        """The schedule with its parts as they are now."""
        return self._with({name: parameter.detach().cpu() for name, parameter in self.parameters.items()})

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the parameters to what `snapshot` gave."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])

    def _with(self, tensors: Mapping[str, Tensor]) -> Schedule:
        """`start` with these tensors, named like the parameters."""
        bridges = {
            name: replace(bridge, tensors=_below(tensors, f"{BRIDGES}/{name}/"))
            for name, bridge in self.start.bridges.items()
        }
        changes = _below(tensors, f"{ADAPTER}/")
        adapter = Adapter(changes) if changes else None
        return replace(self.start, bridges=bridges, prompt_bridge=self._prompt_bridge(tensors), adapter=adapter)

    def _prompt_bridge(self, tensors: Mapping[str, Tensor]) -> PromptBridge | None:
        bridge = self.start.prompt_bridge
        return None if bridge is None else replace(bridge, tensors=_below(tensors, f"{PROMPTS}/"))


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _silent_gate(hidden: int, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """A gated part that adds nothing yet: only its last matrix is zero, so that gradients reach all three in time."""
    gate, up, down = GATED
    return {
        gate: torch.randn(hidden, width, generator=draw) * hidden**-0.5,
        up: torch.randn(hidden, width, generator=draw) * hidden**-0.5,
        down: torch.zeros(width, hidden),
    }
