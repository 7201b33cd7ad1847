"""vLLM's models, with layers that not all tokens run. Weights, parallelism and quantisation stay vLLM's."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.gemma2 import Gemma2ForCausalLM
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.granite import GraniteForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.opt import OPTForCausalLM
from vllm.model_executor.models.phi3 import Phi3ForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from engine.errors import ScheduleError
from engine.forward.compiled_parts import compile_bridge, compile_prompt_bridge
from engine.forward.operations import unit_plans
from engine.kernels import Kernels
from engine.models.families import family_of
from engine.parts.bridge import Bridge
from engine.parts.unit import Unit
from engine.vllm.adapted import adapted_layers
from engine.vllm.passes import BEGINS, ENDS, PLATEAU, WHOLE, Pass, Rows, install
from engine.vllm.plugin import schedule_of
from engine.vllm.segments import Graphs, SegmentRun, compiled

install()


@dataclass(frozen=True)
class Segment:
    """Units that the same rows of any pass run."""

    first: Unit
    own: SegmentRun  # with the model's weights
    adapted: SegmentRun  # with the adapter's changes, where it makes any


class Skipping:
    """A model of vLLM's under a schedule. Subclasses say what the units of their layers are."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        schedule = schedule_of(vllm_config)
        if schedule is None:
            raise ScheduleError("no schedule is named")
        compilation = vllm_config.compilation_config  # by now what it will be
        graphs = compilation.cudagraph_mode
        if graphs.has_full_cudagraphs() or (graphs and not compilation.splitting_ops_contain_kv_cache_update()):
            raise ScheduleError(
                "a schedule runs with graphs that hold neither attention nor what is written to its cache: leave "
                "--compilation-config to vLLM, or take --enforce-eager"
            )
        config, model = vllm_config.model_config.hf_config, vllm_config.model_config
        self.schedule, self.shape = schedule, family_of(config).shape(config)
        schedule.check_fits(self.shape)
        self.current: Pass | None = None  # None: all tokens run all layers
        self._device = torch.device(vllm_config.device_config.device)
        where = (Kernels(), model.dtype, self._device)
        self._bridges = {bridge: compile_bridge(bridge, *where) for bridge in schedule.all_bridges}
        self._adapted: dict[Unit, Any] = {}  # a unit's layer with the adapter's changes
        plans = unit_plans(schedule)
        # How many plateaus, the first ones, run each unit; and which bridges stand before it, on which plateau.
        self._running = {run.unit: plateaus for run, plateaus, _ in plans}
        self._standing = {
            run.unit: [(plateau, self._bridges[each]) for plateau, each in enumerate(before) if each]
            for run, _, before in plans
        }
        stop = schedule.prompt_bridge
        self._maps = None if stop is None else compile_prompt_bridge(stop, self.shape, *where)
        self._skips = None if stop is None else stop.skips  # what prompts skip a block by
        self._skipped_by_prompts = frozenset(() if stop is None else stop.skipped_units)
        self.graphs = Graphs(vllm_config, self.shape.hidden, model.dtype, self._device)
        self._segments = [self._segment(units, vllm_config) for units in self._alike()]
        # Registered, so that vLLM finds what it has compiled when the model is to be freed.
        self.segment_modules = nn.ModuleList(run for each in self._segments for run in (each.own, each.adapted))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As vLLM's, and the adapter's copies of what it changes."""
        loaded: set[str] = super().load_weights(weights)  # type: ignore[misc]
        if self.schedule.adapter is not None:
            # Copies are registered, so that vLLM prepares them as it does its own.
            self._adapted, self.adapted_modules = adapted_layers(self.schedule.adapter, self.decoder_layers)
        return loaded

    def begin_pass(self, groups: Sequence[int], counts: Sequence[int]) -> Pass:
        """The pass over rows sorted by their groups, each with so many tokens: what its attention needs to know."""
        ends = [sum(group <= last for group in groups) for last in range(PLATEAU + len(self.schedule.plateaus))]
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        current = self.current = Pass(tuple(ends), starts, self._device, self.graphs)
        wanted = {rows: None for segment in self._segments for rows, _ in self._spans(segment, current)}
        if self._maps is not None and current.beginning.first < current.beginning.end:
            wanted[current.beginning] = None
        whole = Rows(0, ends[-1])
        current.wanted = tuple(rows for rows in wanted if rows != whole)
        return current

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [N, hidden] before the vocabulary head, of the N tokens of a pass."""
        x = self.embedded(input_ids, positions, inputs_embeds)
        current = self.current
        if get_forward_context().attn_metadata is None or current is None:
            for segment in self._segments:
                if segment.adapted is not segment.own:  # vLLM compiles, or records, what it sees here
                    self.graphs.call(segment.adapted, positions, x, {})
                x = self.graphs.call(segment.own, positions, x, {})
        elif self._maps is None or not current.has_prompts:
            x = self._run(self._segments, current, positions, x)
        else:
            first = self._maps.first
            below = [segment for segment in self._segments if segment.first.layer < first]
            x = self._run(below, current, positions, x)
            kept, stopped = current.kept, current.stopped
            states, places = x[stopped], positions[stopped]
            if len(stopped):
                for layer in range(first, self.shape.layers):
                    self._write(layer, states, places, stopped)
            above = self._segments[len(below) :]
            begins = current.begins  # after what was written, which was not for them
            x[begins] = self._run_first(above, current, positions[begins], x[begins])
            if len(kept):
                x[kept] = self._run(above, current, positions[kept], x[kept])
        return self.normed(x)

    def _run(self, segments: Iterable[Segment], current: Pass, positions: Tensor, x: Tensor) -> Tensor:
        """Hidden states of the tokens of a pass, each through those of these segments and bridges that it runs."""
        for segment in segments:
            above = self._has_stopped(segment.first, current)
            if self._skips is not None and segment.first == self._skips.block.first:
                prompts = slice(0, current.token(current.rows[ENDS]))
                if prompts.stop:
                    self._skip_block(self._skips, current, prompts, positions, x)
            for plateau, bridge in self._standing[segment.first]:
                first, end = current.rows[PLATEAU + plateau - 1 : PLATEAU + plateau + 1]
                tokens = current.tokens(Rows(first, end, above))
                if tokens.stop > tokens.start:
                    x[tokens] = bridge(x[tokens])
            for rows, run in self._spans(segment, current):
                tokens = current.tokens(rows)
                part = self.graphs.call(run, positions[tokens], x[tokens], current.attention(rows))
                if len(part) == len(x):
                    x = part
                else:
                    x[tokens] = part
        return x

    def _skip_block(self, skips: Bridge, current: Pass, prompts: slice, positions: Tensor, x: Tensor) -> None:
        """Take prompts over the block that they skip, in x itself: all of their tokens but the first ones."""
        assert self._maps is not None
        begins = current.begins
        for layer in self._maps.within:
            self._write(layer, x[prompts], positions[prompts], prompts)
        # After what was written, which was not for them.
        inside = [segment for segment in self._segments if segment.first in self._skipped_by_prompts]
        whole = self._run_first(inside, current, positions[begins], x[begins])
        x[prompts] = self._bridges[skips](x[prompts])
        x[begins] = whole

    def _run_first(self, segments: Iterable[Segment], current: Pass, positions: Tensor, x: Tensor) -> Tensor:
        """Hidden states of the first tokens of prompts that begin, which run every layer, by themselves."""
        if len(x):
            for segment in segments:
                x = self.graphs.call(self._of_prompts(segment), positions, x, current.attention(current.beginning))
        return x

    def _alike(self) -> list[list[Unit]]:
        """All units in order, in segments: parts that the same rows run, with bridges before their first ones alone."""
        parts: list[list[Unit]] = []
        last: Any = None
        for unit, plateaus in self._running.items():
            kind = (plateaus, unit in self._skipped_by_prompts, self._is_above(unit))
            if kind != last or self._standing[unit]:
                parts.append([])
            parts[-1].append(unit)
            last = kind
        return parts

    def _segment(self, units: Sequence[Unit], config: VllmConfig) -> Segment:
        def own(unit: Unit, positions: Tensor, x: Tensor) -> Tensor:
            return self.run(unit, self.decoder_layers[unit.layer], positions, x)

        def adapted(unit: Unit, positions: Tensor, x: Tensor) -> Tensor:
            return self.run(unit, self._adapted.get(unit, self.decoder_layers[unit.layer]), positions, x)

        base, adapter = compiled(own, units, "own", (), config), self.schedule.adapter
        if adapter is None or adapter.changes.keys().isdisjoint(units):
            return Segment(units[0], base, base)
        return Segment(units[0], base, compiled(adapted, units, "adapted", adapter.changes, config))

    def _spans(self, segment: Segment, current: Pass) -> list[tuple[Rows, SegmentRun]]:
        """Rows that run a segment, and how: with an adapter decode tokens have weights of their own."""
        above = self._has_stopped(segment.first, current)
        # Prompts: above a prompt bridge those that end, in a block that they skip none.
        is_skipped = segment.first in self._skipped_by_prompts
        first = current.rows[ENDS] if is_skipped else current.rows[BEGINS] if above else 0
        end = current.rows[PLATEAU - 1 + self._running[segment.first]]
        ends, whole = current.rows[ENDS], current.rows[WHOLE]
        # Rows at full depth stand between prompts and decode tokens.
        parts = [(first, ends, self._of_prompts(segment)), (ends, whole, segment.own), (whole, end, segment.adapted)]
        spans: list[tuple[Rows, SegmentRun]] = []
        for start, stop, run in parts:
            if stop <= start:
                continue
            if spans and spans[-1][1] is run:  # in one
                start = spans.pop()[0].first
            spans.append((Rows(start, stop, above), run))
        # What prompts share first: those of the same pass that find it in the cache attend to it.
        return sorted(spans, key=lambda span: span[0].first != ends)

    def _of_prompts(self, segment: Segment) -> SegmentRun:
        """With the adapter's changes, if it changes prompts."""
        adapter = self.schedule.adapter
        return segment.adapted if adapter is not None and adapter.changes_prompts else segment.own

    def _is_above(self, unit: Unit) -> bool:
        return self._maps is not None and unit.layer >= self._maps.first

    def _has_stopped(self, unit: Unit, current: Pass) -> bool:
        """Whether all but the last tokens of prompts in this pass have stopped below a unit."""
        return self._is_above(unit) and current.has_prompts

    def _write(self, layer: int, states: Tensor, positions: Tensor, tokens: Tensor | slice) -> None:
        """Put the keys and values that a prompt bridge gives for states [n, hidden] into a layer's cache."""
        assert self._maps is not None
        k, v = self._maps.keys_and_values(layer, states)
        module = self.decoder_layers[layer].self_attn
        attention, k = module.attn, self.placed(module, positions, k)
        slots = get_forward_context().slot_mapping[attention.layer_name][tokens]
        attention.impl.do_kv_cache_update(attention, k, v.contiguous(), attention.kv_cache, slots)

    @property
    def decoder_layers(self) -> Sequence[Any]:
        return self.model.layers  # type: ignore[attr-defined,no-any-return]

    def embedded(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None) -> Tensor:
        """What the first layer takes, [N, hidden], a tensor of its own."""
        x: Tensor = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()  # type: ignore[attr-defined]
        return x

    def run(self, unit: Unit, layer: Any, positions: Tensor, x: Tensor) -> Tensor:
        """Hidden states [n, hidden] after a unit."""
        return x + self.change(unit, layer, positions, x)

    def change(self, unit: Unit, layer: Any, positions: Tensor, x: Tensor) -> Tensor:
        """What a unit's block gives for hidden states [n, hidden]."""
        if unit.kind == "a":
            return layer.self_attn(positions=positions, hidden_states=layer.input_layernorm(x))  # type: ignore[no-any-return]
        return layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[no-any-return]

    def placed(self, attention: Any, positions: Tensor, k: Tensor) -> Tensor:
        """Keys [n, kv_heads, head_dim] of a prompt bridge with their positions.

        It gives them as `engine.models.rotary` has them, the two dimensions that turn together side by side.
        """
        turned = k[..., : self.shape.rotary_dim or None]
        halves = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        flat = torch.cat([halves, k[..., halves.shape[-1] :]], -1).flatten(1)
        no_keys = torch.zeros_like(k[:, 0])  # which longrope's asks for beside what it takes for queries
        return attention.rotary_emb(positions, flat, no_keys)[0].view(k.shape)  # type: ignore[no-any-return]

    def normed(self, x: Tensor) -> Tensor:
        """What the vocabulary head takes."""
        return self.model.norm(x)  # type: ignore[attr-defined,no-any-return]


class SkippingLlama(Skipping, LlamaForCausalLM):
    """Llama and SmolLM2."""


class SkippingMistral(Skipping, MistralForCausalLM):
    """Mistral."""


class SkippingQwen2(Skipping, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class SkippingQwen3(Skipping, Qwen3ForCausalLM):
    """Qwen3."""


class _Sandwiched(Skipping):
    """Gemma 2 and 3: norms before and after each block."""

    def change(self, unit: Unit, layer: Any, positions: Tensor, x: Tensor) -> Tensor:
        if unit.kind == "a":
            inner = layer.self_attn(positions=positions, hidden_states=layer.input_layernorm(x))
            return layer.post_attention_layernorm(inner)  # type: ignore[no-any-return]
        return layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))  # type: ignore[no-any-return]


class SkippingGemma2(_Sandwiched, Gemma2ForCausalLM):
    """Gemma 2."""


class SkippingGemma3(_Sandwiched, Gemma3ForCausalLM):
    """Gemma 3, text only."""


class SkippingGranite(Skipping, GraniteForCausalLM):
    """Granite: factors on the embeddings and on what each block adds."""

    def embedded(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None) -> Tensor:
        factor: float = self.config.embedding_multiplier
        return super().embedded(input_ids, positions, inputs_embeds) * factor

    def run(self, unit: Unit, layer: Any, positions: Tensor, x: Tensor) -> Tensor:
        factor: float = layer.residual_multiplier
        return x + self.change(unit, layer, positions, x) * factor


class SkippingPhi3(Skipping, Phi3ForCausalLM):
    """Phi-3 and Phi-4."""


class SkippingOPT(Skipping, OPTForCausalLM):
    """OPT."""

    @property
    def decoder_layers(self) -> Sequence[Any]:
        return self.model.decoder.layers  # type: ignore[no-any-return]

    def embedded(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None) -> Tensor:
        decoder = self.model.decoder
        x = super().embedded(input_ids, positions, inputs_embeds)
        if decoder.project_in is not None:
            x, _ = decoder.project_in(x)
        places: Tensor = decoder.embed_positions(positions)
        return x + places

    def run(self, unit: Unit, layer: Any, positions: Tensor, x: Tensor) -> Tensor:
        """As `Skipping.run`: norms before the blocks, in the 350M model after them."""
        first = layer.do_layer_norm_before
        norm = layer.self_attn_layer_norm if unit.kind == "a" else layer.final_layer_norm
        inner = norm(x) if first else x
        if unit.kind == "a":
            inner = layer.self_attn(hidden_states=inner)
        else:
            inner, _ = layer.fc2(layer.activation_fn(layer.fc1(inner)[0]))
        return x + inner if first else norm(x + inner)  # type: ignore[no-any-return]

    def placed(self, attention: Any, positions: Tensor, k: Tensor) -> Tensor:
        """As they are: positions are learned and in the hidden states."""
        return k.contiguous()

    def normed(self, x: Tensor) -> Tensor:
        decoder = self.model.decoder
        if decoder.final_layer_norm is not None:
            x = decoder.final_layer_norm(x)
        if decoder.project_out is not None:
            x, _ = decoder.project_out(x)
        return x
