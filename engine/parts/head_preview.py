"""The vocabulary head in two looks: rough logits of all tokens, exact ones of those that look likeliest.

SVD-softmax (Shim et al., NeurIPS 2017) with the decomposition weighted by the states that the head really sees, so that
a smaller rank will do. A small model's head is a fifth of its decode FLOPs, of which this leaves an eighth to a third.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from engine.errors import ScheduleError
from engine.parts.part import SchedulePart, check_numbers, check_roles, digest_of
from engine.shape import ModelShape

ROLES = ("down", "up", "bias")


@dataclass(frozen=True, eq=False)
class HeadPreview(SchedulePart):
    """Logits of decode tokens: h down up W' + bias, for the `candidates` largest of them h W' instead.

    h is what the head's matrix W [vocab, w] multiplies, the normed state of width w.

    Tensors by role:
        down [w, r], up [r, w]: h down up is close to h where W tells the difference.
        bias [vocab]: what rough logits lack.

    Two are equal when candidates and tensors are, bit for bit. Raises ScheduleError for tensors that do not fit
    together.
    """

    candidates: int
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ScheduleError(f"a head preview needs a candidate at the least, got {self.candidates}")
        check_roles("the head preview", self.tensors, ROLES)
        check_numbers("the head preview", self.tensors)
        down, up, bias = (list(self.tensors[role].shape) for role in ROLES)
        if len(down) != 2 or down != up[::-1] or len(bias) != 1:
            raise ScheduleError(f"the shapes of the head preview do not fit together: {down}, {up}, {bias}")

    @property
    def width(self) -> int:
        """w."""
        return len(self.tensors["down"])

    @property
    def rank(self) -> int:
        """r."""
        return len(self.tensors["up"])

    def parameters(self, shape: ModelShape) -> int:
        """What stands for the shape's `head_parameters`: a token costs twice as many FLOPs."""
        rough, exact = self.rank * (self.width + shape.vocab), self.candidates * self.width
        return shape.head_parameters - shape.vocab * self.width + rough + exact

    @cached_property
    def digest(self) -> str:
        """Of candidates and tensors: it changes when a bit of them does."""
        return digest_of(f"head {self.candidates}", ((role, self.tensors[role]) for role in ROLES))

    def check_fits(self, shape: ModelShape) -> None:
        """Raises ScheduleError if it was made for a model of another width or vocabulary."""
        vocab = len(self.tensors["bias"])
        narrowing = 0 if self.width == shape.hidden else shape.hidden * self.width
        matrix = shape.head_parameters == shape.vocab * self.width + narrowing
        if not matrix or vocab != shape.vocab or self.candidates > vocab:
            raise ScheduleError(
                f"the head preview picks {self.candidates} of {vocab} tokens by states of width {self.width}, but this "
                f"{shape.family} model has {shape.vocab} tokens and width {shape.hidden}: calibrate a schedule for it"
            )
