"""Rotary position embedding as one complex multiplication (`Kernels.rotate`).

transformers pairs dimension i with i + head_dim/2. Attention only sees q . k, so rearranging the rows of the query and
key projections (`interleave`) to make pairs neighbours changes nothing but the speed: neighbours are a complex number.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ModelError
from engine.shape import ModelShape


def interleave(projection: Tensor, shape: ModelShape) -> Tensor:
    """Rearrange each head's rows of a projection [heads * head_dim, ...]: i and i + head_dim/2 side by side.

    Where positions turn a part of a head, i and i + half of that part; the other rows stay where they are.
    """
    heads = projection.unflatten(0, (-1, shape.head_dim))
    turned = heads[:, : shape.rotary_dim or shape.head_dim]
    pairs = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, heads[:, pairs.shape[1] :]], 1).view(projection.shape)


class Rotary:
    """Rotary factors for every position of the context, for the RoPE variants a config can name."""

    def __init__(self, config: Any, shape: ModelShape, device: torch.device, layer_type: str | None = None) -> None:
        """`layer_type` picks the parameters where a config has several sets.

        Raises ModelError for an unknown type, and one that turns another part of a head than the family does.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        kind = parameters["rope_type"]
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            raise ModelError(f"RoPE type {kind!r} is not known; known are default, {', '.join(ROPE_INIT_FUNCTIONS)}")
        positions, turned = torch.arange(shape.context, dtype=torch.float32), shape.rotary_dim or shape.head_dim

        def table(length: int | None) -> Tensor:
            """[context, head_dim / 2], complex: the factors in use once a sequence has `length` tokens."""
            if kind == "default":
                exponents = torch.arange(0, turned, 2, dtype=torch.float32) / turned
                frequencies, scale = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
            else:
                which = {"layer_type": layer_type} if layer_type else {}
                frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length, **which)
                if 2 * len(frequencies) != turned:
                    raise ModelError(
                        f"RoPE type {kind!r} turns {2 * len(frequencies)} of the {shape.head_dim} dimensions of a head "
                        f"by the config (partial_rotary_factor, head_dim), {shape.family} models {turned}"
                    )
            angles = positions[:, None] * frequencies
            factors = torch.complex(angles.cos() * scale, angles.sin() * scale).to(device)
            return F.pad(factors, (0, (shape.head_dim - turned) // 2), value=1.0)  # what is not turned stays as it is

        # "dynamic" differs from "default" only past the context, which is where this engine stops. "longrope" has a
        # second set of factors for sequences that have outgrown the original context.
        self._original_context = shape.context
        self._short = self._long = table(None)
        if kind == "longrope":
            self._original_context = parameters["original_max_position_embeddings"]
            self._short, self._long = table(self._original_context), table(self._original_context + 1)

    def factors(self, positions: Tensor, lengths: Tensor) -> Tensor:
        """Complex [N, 1, head_dim / 2] for tokens at `positions` [N] in sequences of `lengths` [N] tokens."""
        if self._short is self._long:
            return self._short[positions].unsqueeze(1)
        outgrown = (lengths > self._original_context)[:, None]
        return torch.where(outgrown, self._long[positions], self._short[positions]).unsqueeze(1)
