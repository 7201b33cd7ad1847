"""Fit a prompt bridge: ridge regression of the upper layers' keys and values on the state below them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.calibration.collect import Progress
from engine.calibration.moments import RidgeSums
from engine.engine import Engine
from engine.errors import ScheduleError
from engine.forward.packing import packs
from engine.forward.prompt_pass import PROMPT_TOKENS
from engine.parts.part import rounded
from engine.parts.prompt_bridge import PromptBridge
from engine.shape import ModelShape

RIDGE = 1e-3  # relative to the mean variance of an entry of the state


def check_prompt_layers(first: int, shape: ModelShape) -> None:
    """Raises ScheduleError unless prompts of such a model can stop before layer `first`."""
    if not 1 <= first < shape.layers:
        raise ScheduleError(f"prompts can run 1 to {shape.layers - 1} of this model's layers, not {first}")


def fit_prompt_bridge(
    engine: Engine, prompts: Sequence[Sequence[int]], first: int, progress: Progress, ridge: float = RIDGE
) -> PromptBridge:
    """The prompt bridge with the least ridge loss over the prompts' tokens, in memory that does not grow with them.

    Args:
        engine: with the model. Tokens that prompts share (`Engine.share_prefix`) are never bridged, and not fitted to.
        prompts: token ids.
        first: layer before which prompt tokens are to stop.
        progress: told of prompts.
        ridge: relative to the mean variance of an entry of the state.
    """
    sums = _Sums(engine, first)
    done = 0
    with torch.inference_mode():
        for pack in packs(prompts, len, PROMPT_TOKENS):
            engine.observe_prompts(pack, sums.observe)
            done += len(pack)
            progress("collecting keys and values", done, len(prompts))
        return sums.fit(ridge)


class _Sums:
    """X is the state before layer `first`, Y the keys and values of each layer from there on."""

    def __init__(self, engine: Engine, first: int) -> None:
        shape = engine.shape
        self._decoder, self._first, self._layers = engine.decoder, first, range(first, shape.layers)
        width = 2 * shape.kv_heads * shape.head_dim
        self._sums = RidgeSums(shape.hidden, dict.fromkeys(self._layers, width), engine.device)

    def observe(self, place: int, x: Tensor) -> None:
        """Hidden states before a unit."""
        layer, is_mlp = divmod(place, 2)
        if is_mlp or layer not in self._layers:
            return
        if layer == self._first:
            self._sums.add_inputs(x)
        k, v = self._decoder.keys_and_values(layer, x)
        self._sums.add_outputs(layer, torch.cat([k.flatten(1), v.flatten(1)], 1))

    def fit(self, ridge: float) -> PromptBridge:
        weight, bias = self._sums.fit(self._layers, ridge)
        return PromptBridge(self._first, {"weight": rounded(weight).cpu(), "bias": rounded(bias).cpu()})
