"""The linear maps of a model's units: projections of one input stacked into one product, with an adapter's changes."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine.checkpoints.weight_files import Weights
from engine.errors import ScheduleError
from engine.kernels import Kernels, Linear
from engine.parts.adapter import Adapter, LowRank
from engine.parts.unit import Unit

Modules = Mapping[str, str]  # projection -> where the checkpoint has it within a layer
Arrange = Callable[[Tensor], Tensor]  # of a projection's rows [out, ...]


class UnitMaps(NamedTuple):
    """What a unit applies to its normed input, and to what it makes of that."""

    into: Linear  # queries, keys and values side by side, or gate and up
    out: Linear


class Layout(NamedTuple):
    """Which projections a kind of unit has."""

    into: Modules
    out: Modules


class Projections:
    """Of all layers, on one device."""

    def __init__(
        self,
        layers: Sequence[str],
        layouts: Mapping[str, Layout],
        arranged: Mapping[str, Arrange],
        weights: Weights,
        kernels: Kernels,
        device: torch.device,
    ) -> None:
        """Reads them.

        Args:
            layers: each layer's name in the checkpoint.
            layouts: of the kinds of unit, "a" and "m".
            arranged: projections whose rows the decoder wants in another order than the checkpoint's.
            weights, kernels, device: where from, for what, where to.
        """
        self._layers, self._layouts, self._arranged = layers, layouts, arranged
        self._weights, self._kernels, self._device = weights, kernels, device
        self.attention, self.mlp = ([self._read(Unit(kind, i), {}) for i in range(len(layers))] for kind in "am")

    def sizes(self, unit: Unit) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of a unit's projections."""
        found = {}
        for modules in self._layouts[unit.kind]:
            for name, module in modules.items():
                outputs, inputs = self._weights.size(f"{self._layers[unit.layer]}.{module}.weight")
                found[name] = (inputs, outputs)
        return found

    def adapted(self, adapter: Adapter, merge: bool) -> Self:
        """A copy with an adapter's changes, which shares what they leave alone. They are merged into copies of the
        matrices, or stay products of their own, through which gradients flow. Raises ScheduleError if it does not fit.
        """
        twin = copy.copy(self)
        twin.attention, twin.mlp = list(self.attention), list(self.mlp)
        for unit, changes in adapter.changes.items():
            self._check(unit, changes)
            maps = twin.attention if unit.kind == "a" else twin.mlp
            maps[unit.layer] = self._read(unit, changes) if merge else self._beside(maps[unit.layer], unit, changes)
        return twin

    def _read(self, unit: Unit, changes: Mapping[str, LowRank]) -> UnitMaps:
        """Projections stacked, changes merged."""
        maps = []
        for modules in self._layouts[unit.kind]:
            weights, biases = [], []
            for name, module in modules.items():
                where = f"{self._layers[unit.layer]}.{module}"
                weight = self._weights.take(f"{where}.weight")
                if name in changes:
                    down, up = (matrix.to("cpu", torch.float32) for matrix in changes[name])
                    weight = (weight.float() + (down @ up).T).to(weight.dtype)
                weights.append(self._arrange(name, weight))
                if f"{where}.bias" in self._weights:
                    biases.append(self._arrange(name, self._weights.take(f"{where}.bias")))
            bias = torch.cat(biases).to(self._device) if biases else None
            maps.append(self._kernels.inner_linear(torch.cat(weights).to(self._device), bias))
        return UnitMaps(*maps)

    def _beside(self, base: UnitMaps, unit: Unit, changes: Mapping[str, LowRank]) -> UnitMaps:
        """The maps with the changes beside them, in one product each."""
        sizes = self.sizes(unit)

        def sum_of(linear: Linear, modules: Modules) -> Linear:
            if not set(modules) & set(changes):
                return linear
            downs, ups = [], []
            for name in modules:
                inputs, outputs = sizes[name]
                unchanged = (torch.zeros(size, device=self._device) for size in ((inputs, 0), (0, outputs)))
                down, up = changes.get(name, unchanged)
                downs.append(down)
                ups.append(self._arrange(name, up.T).T)
            down, up = torch.cat(downs, 1), torch.block_diag(*ups)
            return lambda x: torch.addmm(linear(x), x @ down, up)

        return UnitMaps(*map(sum_of, base, self._layouts[unit.kind]))

    def _arrange(self, name: str, rows: Tensor) -> Tensor:
        return self._arranged[name](rows) if name in self._arranged else rows

    def _check(self, unit: Unit, changes: Mapping[str, LowRank]) -> None:
        sizes = self.sizes(unit)
        for name, (down, up) in changes.items():
            if name not in sizes:
                raise ScheduleError(
                    f"the adapter changes {unit}.{name}, but that unit's projections are {', '.join(sizes)}: "
                    "it was trained for another model"
                )
            if (got := (len(down), up.shape[1])) != sizes[name]:
                raise ScheduleError(
                    f"the adapter's {unit}.{name} is of {got[0]} inputs and {got[1]} outputs, the model's of "
                    f"{sizes[name][0]} and {sizes[name][1]}: it was trained for another model"
                )
