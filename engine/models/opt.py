"""OPT: learned positions, LayerNorm before the blocks (after them in the 350M model), biases, plain MLP."""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from engine.kernels import Linear
from engine.models.decoder import Attend, Decoder, Rotations, activation
from engine.models.projections import Layout
from engine.shape import ModelShape

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


class OPTDecoder(Decoder):
    """Weights of an OPT on one device."""

    prefix = "model.decoder"
    layouts: ClassVar = {
        "a": Layout({name: f"self_attn.{name}_proj" for name in "qkv"}, {"o": "self_attn.out_proj"}),
        "m": Layout({"up": "fc1"}, {"down": "fc2"}),
    }

    def _read(self, config: Any) -> None:
        self._activation = activation(config.activation_function)
        self._norm_first: bool = config.do_layer_norm_before
        self._attention_norm = [self._norm(f"{layer}.self_attn_layer_norm") for layer in self._layers]
        self._mlp_norm = [self._norm(f"{layer}.final_layer_norm") for layer in self._layers]
        self._positions = self._take("model.decoder.embed_positions.weight")
        last_norm = self._norm_first and not config._remove_final_layer_norm
        self._final_norm = self._norm("model.decoder.final_layer_norm") if last_norm else None
        narrow = config.word_embed_proj_dim != config.hidden_size
        self._project_in, self._project_out = (
            self._kernels.linear(self._take(f"model.decoder.project_{way}.weight")) if narrow else None
            for way in ("in", "out")
        )

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(tokens, self._embedding)
        if self._project_in is not None:
            x = self._project_in(x)
        return x + F.embedding(positions + POSITION_OFFSET, self._positions)

    def rotations(self, positions: Tensor, lengths: Tensor) -> Rotations:
        return ()  # positions are in the hidden states

    def attention(self, layer: int, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        x = x + self._projections.attention[layer].out(attend(layer, *self._project(layer, x)))
        return x if self._norm_first else self._attention_norm[layer](x)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        norm, maps = self._mlp_norm[layer], self._projections.mlp[layer]
        x = x + maps.out(self._activation(maps.into(norm(x) if self._norm_first else x)))
        return x if self._norm_first else norm(x)

    def keys_and_values(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        _, k, v = self._project(layer, x)
        return k, v

    def place_keys(self, layer: int, k: Tensor, rotations: Rotations) -> Tensor:
        return k

    def head_input(self, x: Tensor) -> Tensor:
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

    def _norm(self, name: str) -> Linear:
        weight, bias = (
            self._take(part) if part in self._weights else None for part in (f"{name}.weight", f"{name}.bias")
        )
        hidden = self.shape.hidden  # a map that held the decoder would keep it from being freed
        return lambda x: F.layer_norm(x, (hidden,), weight, bias)
