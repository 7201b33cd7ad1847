"""OPT: learned positions, LayerNorm before the blocks (after them in the 350M model), biases, plain MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.weight_files import Weights
from engine.kernels.activations import activation
from engine.kernels.base import Kernels, Linear
from engine.models.decoder import Attend, Rotations
from engine.models.head import Headed
from engine.models.projections import Layout, Projected, Projections
from engine.shape import ModelShape

LAYOUTS = {
    "a": Layout({name: f"self_attn.{name}_proj" for name in "qkv"}, {"o": "self_attn.out_proj"}),
    "m": Layout({"up": "fc1"}, {"down": "fc2"}),
}
POSITION_OFFSET = 2  # rows of the position table before position 0


def shape(config: Any) -> ModelShape:
    """Sizes from an OPTConfig; raises ModelError for an unknown activation."""
    activation(config.activation_function)
    hidden, narrow = config.hidden_size, config.word_embed_proj_dim
    projection = hidden * narrow if narrow != hidden else 0
    return ModelShape(
        family=config.model_type,
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=hidden // config.num_attention_heads,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        attention_parameters=4 * hidden * hidden,
        mlp_parameters=2 * hidden * config.ffn_dim,
        head_parameters=config.vocab_size * narrow + projection,
        input_parameters=projection,
    )


class OPTDecoder(Projected, Headed):
    """Weights of an OPT on one device."""

    def __init__(
        self, config: Any, shape: ModelShape, weights: Weights, kernels: Kernels, device: torch.device
    ) -> None:
        self.shape = shape
        self._weights, self._kernels, self._device = weights, kernels, device
        self._activation = activation(config.activation_function)
        self._norm_first: bool = config.do_layer_norm_before
        layers = [f"model.decoder.layers.{i}" for i in range(shape.layers)]
        self._attention_norm = [self._norm(f"{layer}.self_attn_layer_norm") for layer in layers]
        self._projections = Projections(layers, LAYOUTS, {}, weights, kernels, device)
        self._mlp_norm = [self._norm(f"{layer}.final_layer_norm") for layer in layers]
        self._embedding = weights.take("model.decoder.embed_tokens.weight").to(device)
        self._positions = weights.take("model.decoder.embed_positions.weight").to(device)
        self._tied = config.tie_word_embeddings
        self._head = kernels.linear(self.head_weight())
        last_norm = self._norm_first and not config._remove_final_layer_norm
        self._final_norm = self._norm("model.decoder.final_layer_norm") if last_norm else None
        narrow = config.word_embed_proj_dim != config.hidden_size
        self._project_in = self._linear("model.decoder.project_in") if narrow else None
        self._project_out = self._linear("model.decoder.project_out") if narrow else None

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [N, hidden] of tokens [N] at positions [N]."""
        x = F.embedding(tokens, self._embedding)
        if self._project_in is not None:
            x = self._project_in(x)
        return x + F.embedding(positions + POSITION_OFFSET, self._positions)

    def rotations(self, positions: Tensor, lengths: Tensor) -> Rotations:
        """None: positions are in the hidden states."""
        return ()

    def attention(self, layer: int, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """x + attention block of a layer, [N, hidden]."""
        x = x + self._projections.attention[layer].out(attend(layer, *self._project(layer, x)))
        return x if self._norm_first else self._attention_norm[layer](x)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """x + MLP block of a layer, [N, hidden]."""
        norm, maps = self._mlp_norm[layer], self._projections.mlp[layer]
        x = x + maps.out(self._activation(maps.into(norm(x) if self._norm_first else x)))
        return x if self._norm_first else norm(x)

    def keys_and_values(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer keeps of hidden states [N, hidden], each [N, heads, head_dim]."""
        _, k, v = self._project(layer, x)
        return k, v

    def place_keys(self, layer: int, k: Tensor, rotations: Rotations) -> Tensor:
        """The keys themselves: positions are in the hidden states."""
        return k

    def head_input(self, x: Tensor) -> Tensor:
        """Hidden states, normed and projected where the model does, [N, word_embed_proj_dim]."""
        for last in (self._final_norm, self._project_out):
            x = x if last is None else last(x)
        return x

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [N, heads, head_dim]."""
        s = self.shape
        into = self._projections.attention[layer].into
        qkv = into(self._attention_norm[layer](x) if self._norm_first else x)
        q, k, v = qkv.view(len(x), 3 * s.heads, s.head_dim).split(s.heads, 1)
        return q, k, v

    def _linear(self, name: str) -> Linear:
        """A projection outside the layers; none has a bias."""
        return self._kernels.linear(self._weights.take(f"{name}.weight").to(self._device))

    def _norm(self, name: str) -> Linear:
        weight, bias = (
            self._weights.take(part).to(self._device) if part in self._weights else None
            for part in (f"{name}.weight", f"{name}.bias")
        )
        return lambda x: F.layer_norm(x, (self.shape.hidden,), weight, bias)
