"""The fitted parts of a schedule on a device, ready to run: their matrices in the kernels' own layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import Kernels, Linear
from engine.models.decoder import Decoder
from engine.parts import head_preview, prompt_bridge
from engine.parts.bridge import EPS, GATED, Bridge
from engine.parts.head_preview import HeadPreview
from engine.parts.prompt_bridge import PromptBridge
from engine.shape import ModelShape

BridgeMap = Callable[[Tensor], Tensor]  # hidden states [N, d] before the block -> hidden states [N, d] after it
Head = Callable[[Tensor], Tensor]  # hidden states [N, d] after the last layer -> logits [N, vocab]

GROUP = 8  # tokens whose largest logit is looked at first


def compile_bridge(bridge: Bridge, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> BridgeMap:
    """What stands in for the bridge's block."""

    def linear(role: str, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        return kernels.linear(bridge.tensors[role].to(device, dtype).T.contiguous(), bias)

    bias = bridge.tensors["bias"].to(device, dtype)
    if "weight" in bridge.tensors:
        affine = linear("weight", bias)
    else:
        down, up = linear("down"), linear("up", bias)

        def affine(x: Tensor) -> Tensor:
            return up(down(x))

    if GATED[0] not in bridge.tensors:
        return lambda x: x + affine(x)
    gate, gate_up, gate_down = (linear(role) for role in GATED)
    ones = torch.ones(bridge.hidden, dtype=dtype, device=device)

    def gated(x: Tensor) -> Tensor:
        n = kernels.rms_norm(x, ones, EPS)
        return x + affine(x) + gate_down(F.silu(gate(n)) * gate_up(n))

    return gated


def compile_prompt_bridge(
    bridge: PromptBridge, shape: ModelShape, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> "PromptMaps":
    """The maps of the layers above, and of those skipped if it has them."""
    within = bridge.skipped_layers if bridge.keeps_skipped else range(0)
    maps: dict[int, Linear] = {}
    for roles, layers in ((prompt_bridge.ROLES, range(bridge.first, shape.layers)), (prompt_bridge.WITHIN, within)):
        if layers:
            tensors = (bridge.tensors[role].to(device, dtype).chunk(len(layers), -1) for role in roles)
            for layer, weight, bias in zip(layers, *tensors, strict=True):
                maps[layer] = kernels.inner_linear(weight.T.contiguous(), bias.contiguous())
    return PromptMaps(shape, bridge.first, within, maps)


@dataclass(frozen=True)
class PromptMaps:
    """A prompt bridge on a device."""

    shape: ModelShape
    first: int
    within: Sequence[int]  # layers that are skipped below, and get keys and values all the same
    maps: Mapping[int, Linear]  # of these, and of each layer from `first` on

    def keys_and_values(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of a layer, for states [N, d] where tokens stop, or before the block: each [N, kv_heads, head_dim], keys
        without positions.
        """
        both = self.maps[layer](x).view(len(x), 2 * self.shape.kv_heads, self.shape.head_dim)
        return both[:, : self.shape.kv_heads], both[:, self.shape.kv_heads :]


def compile_head(
    preview: HeadPreview, decoder: Decoder, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> Head:
    """What gives decode tokens their logits."""
    weight = decoder.head_weight()
    narrow, wide, bias = (preview.tensors[role].to(device, torch.float32) for role in head_preview.ROLES)
    down = kernels.linear(narrow.T.contiguous().to(dtype))
    rough = kernels.rough_linear((weight.float() @ wide.T).to(dtype), bias.to(dtype))

    def head(x: Tensor) -> Tensor:
        h = decoder.head_input(x)
        logits = rough(down(h))
        chosen = _largest(logits, preview.candidates, kernels)
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
