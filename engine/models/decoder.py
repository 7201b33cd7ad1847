"""What a model family provides: its units, on tokens laid side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from engine.parts.adapter import Adapter
from engine.parts.unit import Unit
from engine.shape import ModelShape

# layer, queries [N, heads, head_dim], keys and values [N, kv_heads, head_dim] of N new tokens -> [N, heads * head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# Rotary factors of N tokens, one tensor for each kind of rotary embedding that the model's layers use; often one.
Rotations = tuple[Tensor, ...]


class Decoder(Protocol):
    """A model on one device. x is the hidden states of N tokens, [N, hidden]."""

    shape: ModelShape

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [N, hidden] of tokens [N] at positions [N]."""

    def rotations(self, positions: Tensor, lengths: Tensor) -> Rotations:
        """What `attention` needs to know of tokens at `positions` [N] in sequences of `lengths` [N] tokens."""

    def attention(self, layer: int, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """Hidden states after the attention block of a layer, its residual connection included."""

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """Hidden states after the MLP block of a layer, its residual connection included."""

    def keys_and_values(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's attention block would keep of hidden states [N, hidden], the keys still without positions.

        Each [N, kv_heads, head_dim].
        """

    def place_keys(self, layer: int, k: Tensor, rotations: Rotations) -> Tensor:
        """Such keys with their positions."""

    def logits(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab]: `head_input`, times the head's matrix, `capped`."""

    def head_input(self, x: Tensor) -> Tensor:
        """What the head's matrix multiplies, [N, w], of hidden states [N, hidden] after the last layer."""

    def head_weight(self) -> Tensor:
        """The head's matrix [vocab, w]; read again where the model itself keeps it in another layout."""

    def capped(self, products: Tensor) -> Tensor:
        """Logits, of their products with the head's matrix; may change them in place. Order is kept."""

    def projections(self, unit: Unit) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of the unit's projections that an adapter may change."""

    def adapted(self, adapter: Adapter, merge: bool = True) -> Decoder:
        """This model with an adapter's changes, sharing what they leave alone.

        Args:
            adapter: whose changes.
            merge: into copies of the matrices; else they stay products of their own, through which gradients flow.

        Raises:
            ScheduleError: the adapter does not fit the model.
        """
