"""The numbers of a decoder that schedules, the FLOP ledger and memory planning need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model. A model of L layers has 2L units: an attention and an MLP block per layer."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int  # longest prompt + generation, in tokens
    attention_parameters: int  # parameters of one attention block's matrices (Pa)
    mlp_parameters: int  # parameters of one MLP block's matrices (Pm)

    @property
    def query_width(self) -> int:
        """Width of the queries of one token, heads x head_dim (q in the FLOP formulas)."""
        return self.heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices (P = Pa + Pm)."""
        return self.attention_parameters + self.mlp_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the vocabulary head (H)."""
        return self.vocab * self.hidden

    def cache_elements(self, tokens: int) -> int:
        """Numbers one layer keeps for `tokens` cached tokens: a key and a value each."""
        return 2 * tokens * self.kv_heads * self.head_dim
