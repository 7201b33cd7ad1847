"""The linear maps of a model's units: projections of one input stacked into one product, with an adapter's changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine.checkpoints.weight_files import Weights
from engine.errors import ScheduleError
from engine.kernels.base import Kernels, Linear
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
        self._sizes: dict[Unit, dict[str, tuple[int, int]]] = {}
        self.attention, self.mlp = ([self._read(Unit(kind, i), {}) for i in range(len(layers))] for kind in "am")

    def sizes(self, unit: Unit) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of a unit's projections."""
        if unit not in self._sizes:
            parts = self._layouts[unit.kind]
            self._sizes[unit] = {name: self._size(unit, module) for part in parts for name, module in part.items()}
        return self._sizes[unit]

    def adapted(self, adapter: Adapter, merge: bool) -> Projections:
        """A copy with an adapter's changes, which shares what they leave alone.

        Args:
            adapter: whose changes.
            merge: into copies of the matrices; else they stay products of their own, through which gradients flow.

        Raises:
            ScheduleError: the adapter does not fit the model.
        """
        self._check(adapter)
        twin = copy.copy(self)
        twin.attention, twin.mlp = list(self.attention), list(self.mlp)
        for unit in adapter.units:
            maps = twin.attention if unit.kind == "a" else twin.mlp
            changes = adapter.of(unit)
            maps[unit.layer] = self._read(unit, changes) if merge else self._beside(maps[unit.layer], unit, changes)
        return twin

    def _read(self, unit: Unit, changes: Mapping[str, LowRank]) -> UnitMaps:
        return UnitMaps(*(self._linear(unit, modules, changes) for modules in self._layouts[unit.kind]))

    def _linear(self, unit: Unit, modules: Modules, changes: Mapping[str, LowRank]) -> Linear:
        """Projections stacked, changes merged."""
        weights, biases = [], []
        for name, module in modules.items():
            where, arrange = f"{self._layers[unit.layer]}.{module}", self._arranged.get(name, _as_it_is)
            weight = self._weights.take(f"{where}.weight")
            if name in changes:
                down, up = (matrix.to("cpu", torch.float32) for matrix in changes[name])
                weight = (weight.float() + (down @ up).T).to(weight.dtype)
            weights.append(arrange(weight))
            if f"{where}.bias" in self._weights:
                biases.append(arrange(self._weights.take(f"{where}.bias")))
        bias = torch.cat(biases).to(self._device) if biases else None
        return self._kernels.linear(torch.cat(weights).to(self._device), bias)

    def _beside(self, base: UnitMaps, unit: Unit, changes: Mapping[str, LowRank]) -> UnitMaps:
        """The maps with the changes beside them."""
        layout = self._layouts[unit.kind]
        return UnitMaps(*(self._sum(unit, linear, part, changes) for linear, part in zip(base, layout, strict=True)))

    def _sum(self, unit: Unit, base: Linear, modules: Modules, changes: Mapping[str, LowRank]) -> Linear:
        """Stacked projections, and the products of their changes in one product each."""
        if not set(modules) & set(changes):
            return base
        downs, ups = [], []
        for name in modules:
            inputs, outputs = self.sizes(unit)[name]
            nothing = LowRank(torch.zeros(inputs, 0, device=self._device), torch.zeros(0, outputs, device=self._device))
            down, up = changes.get(name, nothing)
            downs.append(down)
            ups.append(self._arranged.get(name, _as_it_is)(up.T).T)
        down, up = torch.cat(downs, 1), torch.block_diag(*ups)
        return lambda x: torch.addmm(base(x), x @ down, up)

    def _check(self, adapter: Adapter) -> None:
        for unit in adapter.units:
            sizes = self.sizes(unit)
            for name, (down, up) in adapter.of(unit).items():
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

    def _size(self, unit: Unit, module: str) -> tuple[int, int]:
        outputs, inputs = self._weights.size(f"{self._layers[unit.layer]}.{module}.weight")
        return inputs, outputs


class Projected:
    """What every decoder does with its projections."""

    _projections: Projections

    def projections(self, unit: Unit) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of the unit's projections that an adapter may change."""
        return self._projections.sizes(unit)

    def adapted(self, adapter: Adapter, merge: bool = True) -> Self:
        """This model with an adapter's changes; see `Projections.adapted`."""
        twin = copy.copy(self)
        twin._projections = self._projections.adapted(adapter, merge)
        return twin


def _as_it_is(rows: Tensor) -> Tensor:
    return rows
