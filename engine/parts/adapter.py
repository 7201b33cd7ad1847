"""The adapter: low-rank changes to what units compute for decode tokens, and for prompts' tokens where it says so.

LoRA (Hu et al., arXiv 2106.09685). Once merged into a copy of the units' matrices a change costs no FLOPs, only the
memory of the copy. Where prompts keep the base model, one prompt pass serves every schedule and adapter; where they run
fewer layers, these can learn to make up for the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import ScheduleError
from engine.parts.part import SchedulePart, check_numbers, digest_of
from engine.parts.unit import Unit
from engine.shape import ModelShape

ROLES = ("down", "up")


class LowRank(NamedTuple):
    """A change of a projection from x W to x W + x down up."""

    down: Tensor  # [in, r]
    up: Tensor  # [r, out]


@dataclass(frozen=True, eq=False)
class Adapter(SchedulePart):
    """Changes by unit and projection.

    Tensors by `<unit>.<projection>.<role>`, such as "a16.q.down": down [in, r] and up [r, out], of any rank each. The
    projections are the family's own (`Decoder.projections`): q, k, v, o and gate, up, down for a Llama.

    Two adapters are equal when their tensors are, bit for bit, and both or neither change prompts. Raises ScheduleError
    for tensors that do not fit together.
    """

    tensors: Mapping[str, Tensor]
    changes_prompts: bool = False  # all of their tokens but those that prompts share

    def __post_init__(self) -> None:
        if not self.changes:
            raise ScheduleError("the adapter changes nothing: leave it out")
        check_numbers("the adapter", self.tensors)

    @cached_property
    def changes(self) -> dict[Unit, dict[str, LowRank]]:
        """By unit and projection. Raises ScheduleError for a tensor of another name, or one that lacks its pair."""
        changes: dict[Unit, dict[str, LowRank]] = {}
        for name in self.tensors:
            parts = name.split(".")
            if len(parts) != 3 or parts[2] not in ROLES:
                raise ScheduleError(
                    f"the adapter holds {name!r}: its tensors are named like 'a16.q.down' and 'a16.q.up'"
                )
            unit, projection = Unit.parse(parts[0]), parts[1]
            down, up = (self.tensors.get(f"{unit}.{projection}.{role}") for role in ROLES)
            if down is None:
                raise ScheduleError(f"the adapter's change of {unit}.{projection} has no down")
            if up is None or down.dim() != 2 or up.dim() != 2 or down.shape[1] != up.shape[0]:
                shapes = [list(tensor.shape) for tensor in (down, up) if tensor is not None]
                raise ScheduleError(f"the adapter's change of {unit}.{projection} needs down and up, got {shapes}")
            changes.setdefault(unit, {})[projection] = LowRank(down, up)
        return changes

    @property
    def rank(self) -> int:
        """The highest of its changes."""
        return max(change.down.shape[1] for of_unit in self.changes.values() for change in of_unit.values())

    @cached_property
    def digest(self) -> str:
        """Of its tensors and what it changes: it changes when a bit of them does."""
        return digest_of("adapter, prompts" if self.changes_prompts else "adapter", sorted(self.tensors.items()))

    def check_fits(self, shape: ModelShape) -> None:
        """Raises ScheduleError if it changes layers that the model does not have."""
        beyond = [unit for unit in self.changes if unit.layer >= shape.layers]
        if beyond:
            raise ScheduleError(f"the adapter changes {min(beyond)}, but the model ends at layer {shape.layers - 1}")


def silent_adapter(
    projections: Mapping[Unit, Mapping[str, tuple[int, int]]], rank: int, seed: int, changes_prompts: bool = False
) -> Adapter:
    """An adapter that changes nothing yet: every `up` is zero, so that gradients reach both matrices in time.

    Args:
        projections: for each unit the (inputs, outputs) of its projections, as `Decoder.projections` gives them.
        rank: of every change; less where a projection is narrower.
        seed: of the `down` matrices.
        changes_prompts: as well as decode tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for unit, sizes in projections.items():
        for name, (inputs, outputs) in sizes.items():
            r = min(rank, inputs, outputs)
            tensors[f"{unit}.{name}.down"] = torch.randn(inputs, r, generator=draw) * inputs**-0.5
            tensors[f"{unit}.{name}.up"] = torch.zeros(r, outputs)
    return Adapter(tensors, changes_prompts)
