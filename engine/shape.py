"""The numbers of a decoder that schedules, the FLOP ledger and memory planning need."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """How the queries of one layer see its keys."""

    scale: float  # of q . k
    window: int | None = None  # a token sees so many tokens, itself the last; None: all before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


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
    head_parameters: int  # parameters of the matrices from the last hidden state to the logits (H)
    input_parameters: int = 0  # parameters of the matrices between embedding and first layer, where there are any
    attention_kinds: tuple[AttentionKind, ...] = ()  # of each layer; empty: plain in all of them
    rotary_dim: int = 0  # of a head's dimensions, how many positions turn, the first ones; 0: all, where they do

    @property
    def query_width(self) -> int:
        """Width of the queries of one token, heads x head_dim (q in the FLOP formulas)."""
        return self.heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices (P = Pa + Pm)."""
        return self.attention_parameters + self.mlp_parameters

    def attention_kind(self, layer: int) -> AttentionKind:
        """How a layer attends."""
        return self.attention_kinds[layer] if self.attention_kinds else AttentionKind(self.head_dim**-0.5)

    def cache_elements(self, tokens: int) -> int:
        """Numbers one layer keeps for `tokens` cached tokens: a key and a value each."""
        return 2 * tokens * self.kv_heads * self.head_dim
