"""Random adapters, and what they do to a model of transformers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.models.decoder import Decoder
from engine.parts.adapter import Adapter, LowRank
from engine.parts.unit import Unit

MLP = ("gate", "up", "down")
MODULES = {name: f"self_attn.{name}_proj" for name in "qkvo"} | {name: f"mlp.{name}_proj" for name in MLP}
OTHER_MODULES = {
    "opt": {"o": "self_attn.out_proj", "up": "fc1", "down": "fc2"},
    "phi3": {**dict.fromkeys("qkv", "self_attn.qkv_proj"), **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")},
}
FROM_END = {"k": 2, "v": 1, "up": 1}  # where projections are one module: the last of its parts of one size


def random_adapter(decoder: Decoder, units: Iterable[Unit], rank: int = 2, seed: int = 0) -> Adapter:
    """Changes of most of the units' projections, of a few tenths of what goes in."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for unit in units:
        for index, (name, (inputs, outputs)) in enumerate(decoder.projections(unit).items()):
            if index and (unit.layer + index + seed) % 4 == 0:
                continue
            tensors[f"{unit}.{name}.down"] = torch.randn(inputs, rank, generator=draw) * inputs**-0.5
            tensors[f"{unit}.{name}.up"] = torch.randn(rank, outputs, generator=draw) * 0.3
    return Adapter(tensors)


@contextmanager
def adapted(model: PreTrainedModel, adapter: Adapter | None, prompt_tokens: int) -> Iterator[None]:
    """A model whose forward over one text has an adapter's changes, for prompts' tokens only if it changes these."""
    hooks = []
    first = 0 if adapter is not None and adapter.changes_prompts else prompt_tokens

    def change(name: str, low_rank: LowRank) -> Any:
        def add(_module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:  # [n, outputs], or [1, n, outputs]
            down, up = (matrix.to(output.dtype) for matrix in low_rank)
            changed = torch.arange(output.shape[-2])[:, None] >= first
            first_of = max(0, output.shape[-1] - FROM_END.get(name, output.shape[-1]) * up.shape[1])
            into = output.clone()
            into[..., first_of : first_of + up.shape[1]] += changed * (inputs[0] @ down @ up)
            return into

        return add

    modules = {**MODULES, **OTHER_MODULES.get(model.config.model_type, {})}
    changes = (
        [(unit, *named) for unit, projections in adapter.changes.items() for named in projections.items()]
        if adapter
        else []
    )
    for unit, name, low_rank in changes:
        module = model.get_decoder().layers[unit.layer].get_submodule(modules[name])
        hooks.append(module.register_forward_hook(change(name, low_rank)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
