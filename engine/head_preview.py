"""The vocabulary head in two looks: rough logits of all tokens, exact ones of those that look likeliest.

SVD-softmax (Shim et al., NeurIPS 2017) with the decomposition weighted by the states that the head really sees, so that
a smaller rank will do. A small model's head is a fifth of its decode FLOPs, of which this leaves a fifth to a third.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.decoder import Decoder
from engine.errors import ScheduleError
from engine.kernels import Kernels
from engine.schedule_part import SchedulePart, check_numbers, check_roles, digest_of
from engine.shape import ModelShape

Head = Callable[[Tensor], Tensor]  # hidden states [N, d] after the last layer -> logits [N, vocab]

ROLES = ("down", "up", "bias")
GROUP = 8  # tokens whose largest logit is looked at first


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

    def compiled(self, decoder: Decoder, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Head:
        """The head on a device, its matrices in the kernels' own layout."""
        weight = decoder.head_weight()
        narrow, wide, bias = (self.tensors[role].to(device, torch.float32) for role in ROLES)
        down = kernels.linear(narrow.T.contiguous().to(dtype))
        rough = kernels.rough_linear((weight.float() @ wide.T).to(dtype), bias.to(dtype))

        def head(x: Tensor) -> Tensor:
            h = decoder.head_input(x)
            logits = rough(down(h))
            chosen = _largest(logits, self.candidates, kernels)
            return decoder.capped(logits.scatter_(1, chosen, kernels.chosen_products(h, weight, chosen)))

        return head


def _largest(logits: Tensor, count: int, kernels: Kernels) -> Tensor:
    """Where the largest logits [N, vocab] of each row are, [N, count].

    They lie in the groups with the largest maxima. On a CPU, 256 of 49,152 are found in 32 rows in 1.1 ms; without
    groups it takes 5 ms.
    """
    rows, vocab = logits.shape
    groups = vocab // GROUP  # the first holds tokens 0, groups, 2 groups, ...
    if vocab % GROUP or groups < count:
        return kernels.largest(logits, count)
    best = kernels.largest(logits.view(rows, GROUP, groups).amax(1), count)
    firsts = torch.arange(0, vocab, groups, device=logits.device)
    tokens = (best[:, None] + firsts[:, None]).flatten(1)  # [N, GROUP x count]
    return tokens.gather(1, kernels.largest(logits.gather(1, tokens), count))
