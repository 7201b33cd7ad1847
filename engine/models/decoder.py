"""What every model family has: its units, on tokens laid side by side, and a vocabulary head."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.weight_files import Weights
from engine.errors import ModelError
from engine.kernels import Kernels
from engine.models.projections import Layout, Projections
from engine.models.rotary import interleave
from engine.parts.adapter import Adapter
from engine.parts.unit import Unit
from engine.shape import ModelShape

# layer, queries [N, heads, head_dim], keys and values [N, kv_heads, head_dim] of N new tokens, all of one precision
# -> [N, heads * head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# Rotary factors of N tokens, one tensor for each kind of rotary embedding that the model's layers use; often one.
Rotations = tuple[Tensor, ...]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that a config calls so; raises ModelError listing those known."""
    if name not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


HEAD = "lm_head.weight"


def has_own_head(weights: Weights, embedding: str) -> bool:
    """Whether there is a head beside the embedding that differs from it, as where one was trained and merged: then a
    config that says they are tied does not count, as in transformers.
    """
    return HEAD in weights and embedding in weights and not torch.equal(weights.take(HEAD), weights.take(embedding))


class Decoder(ABC):
    """A model on one device. x is the hidden states of N tokens, [N, hidden]."""

    prefix: str  # of the names of its tensors in a checkpoint
    layouts: ClassVar[Mapping[str, Layout]]  # of the kinds of unit, "a" and "m"
    rotated: Sequence[str] = ()  # projections whose rows are laid out for `Kernels.rotate`

    def __init__(
        self, config: Any, shape: ModelShape, weights: Weights, kernels: Kernels, device: torch.device
    ) -> None:
        self.shape = shape
        self._weights, self._kernels, self._device = weights, kernels, device
        self._layers = [f"{self.prefix}.layers.{i}" for i in range(shape.layers)]
        arranged = dict.fromkeys(self.rotated, partial(interleave, shape=shape))
        self._projections = Projections(self._layers, self.layouts, arranged, weights, kernels, device)
        embedding = f"{self.prefix}.embed_tokens.weight"
        tied, is_alone = config.tie_word_embeddings, HEAD in weights and embedding not in weights
        self._embedding = self._take(HEAD if tied and is_alone else embedding)
        is_head = tied and not has_own_head(weights, embedding)  # the embedding too
        head = self._embedding if is_head else self._take(HEAD)
        self._head = kernels.linear(head)
        # None where kernels keep it in a layout of their own, and it is nothing else.
        self._head_weight = head if is_head or kernels.keeps_weights else None
        self._read(config)

    @abstractmethod
    def _read(self, config: Any) -> None:
        """What else the family needs of the config and the weights."""

    @abstractmethod
    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [N, hidden] of tokens [N] at positions [N]."""

    @abstractmethod
    def rotations(self, positions: Tensor, lengths: Tensor) -> Rotations:
        """What `attention` needs to know of tokens at `positions` [N] in sequences of `lengths` [N] tokens."""

    @abstractmethod
    def attention(self, layer: int, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """Hidden states after the attention block of a layer, its residual connection included."""

    @abstractmethod
    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """Hidden states after the MLP block of a layer, its residual connection included."""

    @abstractmethod
    def keys_and_values(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's attention block would keep of hidden states [N, hidden], the keys still without positions.

        Each [N, kv_heads, head_dim].
        """

    @abstractmethod
    def place_keys(self, layer: int, k: Tensor, rotations: Rotations) -> Tensor:
        """Such keys [N, any number of heads, head_dim] with their positions; of a family that rotates, queries too."""

    @abstractmethod
    def head_input(self, x: Tensor) -> Tensor:
        """What the head's matrix multiplies, [N, w], of hidden states [N, hidden] after the last layer."""

    def logits(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab]: `head_input`, times the head's matrix, `capped`."""
        return self.capped(self._head(self.head_input(x)))

    def head_weight(self) -> Tensor:
        """The head's matrix [vocab, w]; read again where it is its own and kernels keep it in another layout."""
        return self._take(HEAD) if self._head_weight is None else self._head_weight

    def capped(self, products: Tensor) -> Tensor:
        """Logits, of their products with the head's matrix; may change them in place. Order is kept."""
        return products

    def projections(self, unit: Unit) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of the unit's projections that an adapter may change."""
        return self._projections.sizes(unit)

    def adapted(self, adapter: Adapter, merge: bool = True) -> Self:
        """This model with an adapter's changes, see `Projections.adapted`, sharing what they leave alone."""
        twin = copy.copy(self)
        twin._projections = self._projections.adapted(adapter, merge)
        return twin

    def _take(self, name: str) -> Tensor:
        return self._weights.take(name).to(self._device)
