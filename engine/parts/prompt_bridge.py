"""The prompt bridge: a linear map that gives the upper layers' keys and values, so that prompts need not run them.

After SwiftKV (arXiv 2410.03960), which distils its projections; here they are fitted in closed form. Prompts may leave
out a block of layers below too, as decode tokens do: at equal FLOPs some of both costs far less quality than either.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from engine.errors import ScheduleError
from engine.parts.bridge import Bridge
from engine.parts.part import SchedulePart, check_numbers, check_roles, digest_of
from engine.parts.unit import Unit
from engine.shape import ModelShape

ROLES = ("weight", "bias")
WITHIN = ("within_weight", "within_bias")


@dataclass(frozen=True, eq=False)
class PromptBridge(SchedulePart):
    """All tokens of a prompt but its first and its last stop before layer `first`; below it all but the first may skip
    a block, in whose place they run a bridge.

    For each layer from there on, keys before their positions are put in, and values, are x weight + bias of the state x
    where the token stopped. Layers of the block may get theirs so too, of the state before it: then decode tokens may
    run them. A prompt's first token, of several, runs every layer: a model's states there are unlike all others
    (attention sinks, arXiv 2309.17453), and no linear map gives them. Tokens that prompts share
    (`Engine.share_prefix`) are computed at full depth too.

    Tensors by role, with w = kv_heads x head_dim:
        weight [d, layers above x 2 w]: keys and values of layer `first`, keys and values of the next, ...
        bias [layers above x 2 w].
        within_weight [d, layers of the block x 2 w], within_bias [layers of the block x 2 w], optional: the same of
            the block.

    Two are equal when layer and tensors are, bit for bit. Raises ScheduleError for tensors that do not fit together.
    """

    first: int
    tensors: Mapping[str, Tensor]
    skips: Bridge | None = None  # in place of whole layers below `first`

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ScheduleError(f"prompts run layer 0 at the least, so the prompt bridge starts at 1, not {self.first}")
        check_roles("the prompt bridge", self.tensors, self._roles)
        check_numbers("the prompt bridge", self.tensors)
        for weight, bias in ([self.tensors[role] for role in pair] for pair in self._pairs):
            if weight.dim() != 2 or bias.shape != weight.shape[1:]:
                raise ScheduleError(
                    f"the shapes of the prompt bridge do not fit together: {list(weight.shape)}, {list(bias.shape)}"
                )
        if self.skips is None:
            if self.keeps_skipped:
                raise ScheduleError("the prompt bridge has keys and values of a block, but prompts skip none")
            return
        start, end = self.skips.block
        if start.kind != "a" or end.kind != "m" or not 1 <= start.layer <= end.layer < self.first:
            raise ScheduleError(
                f"prompts that stop before layer {self.first} can skip whole layers from 1 to {self.first - 1}, "
                f"not {self.skips.block}"
            )

    @property
    def layers(self) -> int:
        """How many all tokens of a prompt run."""
        return len(self.run_layers)

    @property
    def run_layers(self) -> list[int]:
        """Those."""
        return [layer for layer in range(self.first) if layer not in self.skipped_layers]

    @property
    def skipped_layers(self) -> range:
        """Those below `first` that its tokens skip."""
        return range(0) if self.skips is None else range(self.skips.block.first.layer, self.skips.block.last.layer + 1)

    @property
    def skipped_units(self) -> tuple[Unit, ...]:
        """Their units."""
        return () if self.skips is None else self.skips.block.units

    @property
    def keeps_skipped(self) -> bool:
        """Whether these get keys and values, so that decode tokens may run them."""
        return WITHIN[0] in self.tensors

    @property
    def first_place(self) -> int:
        """Place of the first unit that not all of its tokens run."""
        return min((unit.place for unit in self.skipped_units), default=2 * self.first)

    @property
    def stop_parameters(self) -> int:
        """Entries of the matrix that a token meets where it stops; it costs twice as many FLOPs."""
        return self.tensors["weight"].numel()

    @property
    def skip_parameters(self) -> int:
        """The same of those that it meets where the block would start."""
        within = self.tensors[WITHIN[0]].numel() if self.keeps_skipped else 0
        return within + (self.skips.parameters if self.skips else 0)

    @cached_property
    def digest(self) -> str:
        """Of layer and tensors: it changes when a bit of them does."""
        what = f"prompts {self.first}" + (f", {self.skips.digest}" if self.skips else "")
        return digest_of(what, ((role, self.tensors[role]) for role in self._roles))

    def check_fits(self, shape: ModelShape) -> None:
        """Raises ScheduleError if it was made for a model of another width or depth."""
        layers = (shape.layers - self.first, len(self.skipped_layers))
        for (role, _), count in zip(self._pairs, layers, strict=False):
            wanted, found = [shape.hidden, count * shape.cache_elements(1)], list(self.tensors[role].shape)
            if self.first >= shape.layers or found != wanted:
                raise ScheduleError(
                    f"the prompt bridge starts at layer {self.first} with a {role} of {found}, but this {shape.family} "
                    f"model has {shape.layers} layers and needs {wanted}: calibrate a schedule for this model"
                )
        if self.skips is not None and self.skips.hidden != shape.hidden:
            raise ScheduleError(
                f"prompts skip a block by a bridge of width {self.skips.hidden}, but the hidden states of this "
                f"{shape.family} model have width {shape.hidden}: calibrate a schedule for this model"
            )

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        """Roles of each matrix and its bias."""
        return [ROLES, WITHIN] if set(WITHIN) & set(self.tensors) else [ROLES]

    @property
    def _roles(self) -> list[str]:
        return [role for pair in self._pairs for role in pair]
