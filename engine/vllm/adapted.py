"""An adapter in vLLM: copies of the layers' modules that it changes, for decode tokens alone."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from engine.errors import ScheduleError
from engine.parts.adapter import Adapter
from engine.parts.unit import Unit

# The modules that may hold a projection, and which of the parts stacked there it is.
PLACES: dict[str, tuple[tuple[str, ...], int]] = {
    "q": (("qkv_proj",), 0),
    "k": (("qkv_proj",), 1),
    "v": (("qkv_proj",), 2),
    "o": (("o_proj", "out_proj"), 0),
    "gate": (("gate_up_proj",), 0),
    "up": (("gate_up_proj", "fc1"), 1),
    "down": (("down_proj", "fc2"), 0),
}


def adapted_layers(adapter: Adapter, layers: Sequence[Any]) -> tuple[dict[Unit, Any], nn.ModuleList]:
    """Of every unit that it changes the layer with its own weights there, and the copied modules.

    All else of such a layer is the layer's own, its attention and so its cache too. The weights are as loaded, and
    whole: those of one device. Raises ScheduleError for an adapter that was trained for another model.
    """
    twins: dict[Unit, Any] = {}
    copies = nn.ModuleList()
    for unit, changes in adapter.changes.items():
        twin = holder = _shallow(layers[unit.layer])
        inside = "self_attn" if unit.kind == "a" else "mlp"
        if hasattr(twin, inside):  # an OPT's layer holds the matrices of its MLP itself
            twin._modules[inside] = holder = _shallow(getattr(twin, inside))
        own: dict[str, Any] = {}
        for projection, (down, up) in changes.items():
            names, part = PLACES.get(projection, ((), 0))
            name = next((name for name in names if hasattr(holder, name)), None)
            if name is None:
                raise ScheduleError(f"the adapter changes {unit}.{projection}, which this model does not have")
            if name not in own:
                own[name] = _copied(getattr(holder, name))
            rows = _rows(own[name], part)
            change = (down.float() @ up.float()).T.to(rows.device)
            if rows.shape != change.shape:
                raise ScheduleError(
                    f"the adapter's {unit}.{projection} is of {list(change.shape)}, the model's of {list(rows.shape)}: "
                    "it was trained for another model"
                )
            rows.copy_((rows.float() + change).to(rows.dtype))
        holder._modules.update(own)
        copies.extend(own.values())
        twins[unit] = twin
    return twins, copies


def _rows(linear: Any, part: int) -> Tensor:
    """The weights [outputs, inputs] of one of the projections that are stacked in a module."""
    weight: Tensor = linear.weight.data
    sizes: Sequence[int] = getattr(linear, "output_partition_sizes", [len(weight)])
    return weight if len(sizes) == 1 else weight.split(list(sizes))[part]


def _shallow(module: nn.Module) -> Any:
    """A module with the same parts, which may be given others."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _copied(linear: nn.Module) -> Any:
    """A module with parameters of its own, plain ones: vLLM's cannot be copied, and these are loaded."""
    twin = _shallow(linear)
    twin._parameters = {
        name: None if parameter is None else nn.Parameter(parameter.data.clone(), requires_grad=False)
        for name, parameter in linear._parameters.items()
    }
    return twin
