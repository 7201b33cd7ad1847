"""The bridge: a small map applied to the hidden state in place of a skipped block.

Linear replacements of blocks: ReplaceMe (arXiv 2505.02819), Din et al. (arXiv 2303.09435).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

from torch import Tensor

from engine.errors import ScheduleError
from engine.parts.part import SchedulePart, check_numbers, digest_of
from engine.parts.unit import Block

LINEAR_FORMS = (("weight",), ("down", "up"))
GATED = ("gate", "gate_up", "gate_down")
EPS = 1e-6  # of the gated part's RMS norm


@dataclass(frozen=True, eq=False)
class Bridge(SchedulePart):
    """x <- x + L(x) + b + G(x) in place of a block, for hidden states of width d.

    Tensors by role:
        weight [d, d], or down [d, r] and up [r, d]: L(x) = x weight, or the low-rank x down up.
        bias [d]: b; the mean of the fit is folded into it.
        gate, gate_up [d, h], gate_down [h, d], optional: G(x) = (silu(n gate) * (n gate_up)) gate_down with
            n = x / sqrt(mean(x^2) + eps): hidden states grow along the layers, and a gate needs inputs of one size.

    Two bridges are equal when block and tensors are, bit for bit. Raises ScheduleError for tensors that do not fit
    together.
    """

    block: Block
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        roles = set(self.tensors) - {"bias"} - set(GATED)
        gated = set(self.tensors) & set(GATED)
        if "bias" not in self.tensors or roles not in map(set, LINEAR_FORMS) or gated not in (set(), set(GATED)):
            raise ScheduleError(
                f"the bridge over {self.block} holds {', '.join(sorted(self.tensors)) or 'nothing'}: it needs bias, "
                f"weight or down and up, and may have {', '.join(GATED)}"
            )
        check_numbers(f"the bridge over {self.block}", self.tensors)
        if not self._fit_together:
            named = {role: list(tensor.shape) for role, tensor in self.tensors.items()}
            raise ScheduleError(f"the shapes of the bridge over {self.block} do not fit together: {named}")

    @classmethod
    def affine(cls, block: Block, weight: Tensor, bias: Tensor) -> Self:
        """x <- x + x weight + bias."""
        return cls(block, {"weight": weight, "bias": bias})

    @property
    def corrects(self) -> bool:
        """Whether it replaces nothing: a correction between two units of what bridges below it have left wrong."""
        return self.block.last.place == self.block.first.place - 1

    @property
    def hidden(self) -> int:
        """Width d of the hidden states it maps."""
        return self.tensors["bias"].shape[-1]

    @cached_property
    def parameters(self) -> int:
        """Entries of its matrices: a token costs twice as many FLOPs."""
        return sum(tensor.numel() for role, tensor in self.tensors.items() if role != "bias")

    @property
    def form(self) -> str:
        """ "affine" or "low rank", "gated" if it has that part."""
        linear = "affine" if "weight" in self.tensors else "low rank"
        return f"{linear}, gated" if GATED[0] in self.tensors else linear

    @cached_property
    def digest(self) -> str:
        """Of block and tensors: it changes when a bit of them does."""
        return digest_of(str(self.block), sorted(self.tensors.items()))

    @property
    def _fit_together(self) -> bool:
        if any(tensor.dim() != (1 if role == "bias" else 2) for role, tensor in self.tensors.items()):
            return False
        linear = [role for form in LINEAR_FORMS for role in form if role in self.tensors]
        shapes = [tuple(self.tensors[role].shape) for role in linear]
        if not shapes[0][0] == shapes[-1][-1] == self.hidden or any(a[-1] != b[0] for a, b in pairwise(shapes)):
            return False
        if GATED[0] not in self.tensors:
            return True
        gate, up, down = (tuple(self.tensors[role].shape) for role in GATED)
        return gate == up == down[::-1] and gate[0] == self.hidden
