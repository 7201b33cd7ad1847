"""Teacher forcing: known answers go through the layers in one pass, each token as decoding would have run it.

Active sets only shrink along an answer, so the tokens of an answer that run a unit are its first ones, and each attends
to all that came before it. One pass is therefore exactly what decoding under the schedule computes, without its steps.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.forward.compiled_parts import Head
from engine.forward.operations import Compiled, Observe, Operation, run_units, unit_plans
from engine.forward.packing import packs
from engine.forward.prompt_pass import FULL_DEPTH, PROMPT_TOKENS, PromptPass
from engine.parts.bridge import Bridge
from engine.schedules.schedule import PromptPlan, Schedule

LOGIT_TOKENS = 512  # tokens whose logits are computed at a time: bounds memory


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and all tokens that were generated for it."""

    prompt: Sequence[int]
    tokens: Sequence[int]

    @property
    def passes(self) -> int:
        """Decode passes: every token but the last is fed back."""
        return len(self.tokens) - 1


class KeptPrompts:
    """Prompts that ran, each once, and what answers attend to: 2 x kv_heads x head_dim numbers a token and layer."""

    def __init__(
        self,
        prompts: PromptPass,
        tokens: Iterable[Sequence[int]],
        plan: PromptPlan = FULL_DEPTH,
        compiled: Compiled | None = None,
    ) -> None:
        """`plan` and `compiled` are as for `PromptPass.run`."""
        self.model = prompts
        self.layers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(prompts.decoder.shape.layers)]
        self.places = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, tokens)))}
        # [P, hidden]: of each prompt's last token after all layers
        self.ends = torch.cat(
            [prompts.run(pack, self._keep, plan, compiled) for pack in packs(self.places, len, PROMPT_TOKENS)]
        )

    def _keep(self, layer: int, index: int, k: Tensor, v: Tensor) -> None:
        # Copies: a view of the fused projection would keep the queries too.
        self.layers[layer].append((k.clone(), v.clone()))

    def forget_all_but(self, layers: set[int]) -> None:
        """Free the keys and values of all other layers, which no later pass behind these prompts may run."""
        for layer in set(range(len(self.layers))) - layers:
            self.layers[layer] = []


class AnswerPass:
    """Passes over the answers to prompts that have run: their N tokens are those fed back, answer after answer."""

    def __init__(self, prompts: KeptPrompts, answers: Sequence[Answer]) -> None:
        """Answers need two tokens or more: the first comes from the prompt pass."""
        model = prompts.model
        self._decoder, self._kernels, self._device = model.decoder, model.kernels, model.device
        self.answers = answers
        passes = torch.tensor([answer.passes for answer in answers])
        self.sample = torch.arange(len(answers)).repeat_interleave(passes)  # [N]: whose token
        self.step = torch.cat([torch.arange(count) for count in passes.tolist()])  # [N]: decode step
        self.next_token = torch.tensor([token for answer in answers for token in answer.tokens[1:]])  # [N]: the label
        lengths = torch.tensor([len(answer.prompt) for answer in answers])
        self._positions = (lengths[self.sample] + self.step).to(self._device)
        fed = torch.tensor([token for answer in answers for token in answer.tokens[:-1]], device=self._device)
        self._embedded = self._decoder.embed(fed, self._positions)
        self.prompts = prompts
        self._prompt_of = [prompts.places[tuple(answer.prompt)] for answer in answers]
        self.first_hidden = prompts.ends[self._prompt_of]  # [A, hidden]: what each answer's first token was chosen from

    @property
    def vocab(self) -> int:
        """Width of `logits`."""
        return self._decoder.shape.vocab

    def hidden(
        self,
        schedule: Schedule,
        compiled: Compiled,
        start: tuple[int, Tensor] | None = None,
        observe: Observe | None = None,
        end: int | None = None,
    ) -> Tensor:
        """Hidden states [N, hidden] after the last layer, or before the unit whose place is `end`.

        Args:
            schedule, compiled: what each token runs.
            start: (place of a unit, hidden states [N, hidden] before it) to go on from; default the embeddings.
            observe: called with the place of each unit and the hidden states [N, hidden] before it, and with 2L at the
                end.
        """
        plateau = torch.tensor([schedule.plateau_at(step) for step in range(int(self.step.max()) + 1)])[self.step]
        place, x = start or (0, self._embedded)
        for run, plateaus, before in unit_plans(schedule)[place:end]:
            if observe is not None:
                observe(run.unit.place, x)
            for bridge in dict.fromkeys(before):
                if bridge is not None:
                    applied = torch.tensor([each == bridge for each in before])
                    x = self._run(bridge, x, applied[plateau], compiled)
            x = self._run(run, x, plateau < plateaus, compiled)
        if observe is not None and end is None:
            observe(2 * schedule.layers, x)
        return x

    def full_depth(self, observe: Observe | None = None) -> Tensor:
        """`hidden` of the model as it is."""
        return self.hidden(Schedule.full_depth(self._decoder.shape.layers), Compiled(), observe=observe)

    def full_depth_at(self, places: Container[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """The same, and hidden states [N, hidden] before the units at some places; 2L is behind the last unit."""
        states: dict[int, Tensor] = {}

        def keep(place: int, x: Tensor) -> None:
            if place in places:
                states[place] = x

        return self.full_depth(keep), states

    def logits(self, x: Tensor, head: Head | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Logits [n, vocab] of hidden states [N, hidden], a slice of the tokens at a time, by default exactly."""
        head = head or self._decoder.logits
        for first in range(0, len(x), LOGIT_TOKENS):
            part = slice(first, min(first + LOGIT_TOKENS, len(x)))
            yield part, head(x[part])

    def scheduled_logits(self, x: Tensor, schedule: Schedule, compiled: Compiled) -> Iterator[tuple[slice, Tensor]]:
        """The same as decoding under a schedule computes them."""
        return self.logits(x, compiled.head(schedule, self._decoder))

    def _run(self, operation: Operation, x: Tensor, which: Tensor, compiled: Compiled) -> Tensor:
        """Hidden states [N, hidden] after an operation on some of the tokens, `which` [N] of bool."""
        if not bool(which.any()):
            return x
        # To index by what lies on a CPU, a GPU is waited for.
        rows = None if bool(which.all()) else which.nonzero()[:, 0].to(self._device)
        part, positions = (x, self._positions) if rows is None else (x[rows], self._positions[rows])
        if isinstance(operation, Bridge):
            part = compiled.bridges[operation](part)
        else:
            counts = torch.bincount(self.sample[which], minlength=len(self._prompt_of)).tolist()

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                kept = (self.prompts.layers[layer][prompt] for prompt in self._prompt_of)
                seen = [
                    (torch.cat([keys, own_keys]), torch.cat([values, own_values]))
                    for (keys, values), own_keys, own_values in zip(kept, k.split(counts), v.split(counts), strict=True)
                ]
                return self._kernels.packed_attention(q, counts, seen, self._decoder.shape.attention_kind(layer))

            rotations = self._decoder.rotations(positions, positions + 1)
            model = compiled.model(operation.adapter, self._decoder)
            part = run_units(model, [operation.unit], part, rotations, attend)
        return part if rows is None else x.index_copy(0, rows, part)
