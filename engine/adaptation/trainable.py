"""A schedule's bridges as parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.bridge import GATED, Bridge, BridgeMap
from engine.kernels import Kernels
from engine.schedule import Schedule


class TrainableBridges:
    """Parameters named `<bridge>.<role>`, in float32: the closed-form fit, and a gated part that starts at zero."""

    def __init__(self, schedule: Schedule, gate_width: int, seed: int, device: torch.device) -> None:
        self._schedule = schedule
        draw = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, bridge in schedule.bridges.items():
            tensors = dict(bridge.tensors)
            if gate_width and GATED[0] not in tensors:
                tensors |= _silent_gate(bridge.hidden, gate_width, draw)
            for role, tensor in tensors.items():
                self.parameters[f"{name}.{role}"] = nn.Parameter(tensor.detach().to(device, torch.float32).clone())

    def maps(self, kernels: Kernels, device: torch.device) -> dict[Bridge, BridgeMap]:
        """What the schedule's own bridges are to do now; gradients flow to the parameters."""
        return {
            bridge: replace(bridge, tensors=self._of(name)).compiled(kernels, torch.float32, device)
            for name, bridge in self._schedule.bridges.items()
        }

    def schedule(self, tensors: Mapping[str, Tensor] | None = None) -> Schedule:
        """The schedule with these bridges, by default as they are now."""
        values = self.parameters if tensors is None else tensors
        bridges = {
            name: replace(bridge, tensors={role: value.detach().cpu() for role, value in _roles(values, name).items()})
            for name, bridge in self._schedule.bridges.items()
        }
        return replace(self._schedule, bridges=bridges)

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the parameters to what `snapshot` gave."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])

    def _of(self, bridge: str) -> dict[str, Tensor]:
        return _roles(self.parameters, bridge)


def _roles(tensors: Mapping[str, Tensor], bridge: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{bridge}."): value for name, value in tensors.items() if name.startswith(f"{bridge}.")}


def _silent_gate(hidden: int, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """A gated part that adds nothing yet: only its last matrix is zero, so that gradients reach all three in time."""
    gate, up, down = GATED
    return {
        gate: torch.randn(hidden, width, generator=draw) * hidden**-0.5,
        up: torch.randn(hidden, width, generator=draw) * hidden**-0.5,
        down: torch.zeros(width, hidden),
    }
