"""One pass of vLLM's, its rows sorted by depth, so that the tokens that run any one unit are a slice of all.

    rows    [prompts that go on | begin | begin and end | end | full depth | tokens of plateau 0 | of plateau 1 | ...]

Active sets are nested, so a unit runs the tokens of the prompts and of the first plateaus: a prefix. Above a prompt
bridge prompts that go on are left out and one that ends is one token, its last; the first token of those that begin
runs every layer by itself. Requests may ask for full depth: their prompts and decode tokens run everything, and so does
what prompts share, in passes of its own. Attention needs vLLM's metadata of just the rows that run it: `install` has
them built beside those of the whole pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from engine.errors import ScheduleError
from engine.schedules.schedule import Schedule
from engine.vllm.plugin import ATTENTION, FULL_DEPTH, shared_of
from engine.vllm.segments import Graphs

# Groups of rows, each further plateau the next one. Prompts that begin stand side by side, and so do those that end.
GOES_ON, BEGINS, BEGINS_AND_ENDS, ENDS, WHOLE, PLATEAU = range(6)


class Rows(NamedTuple):
    """Rows of a pass, [first, end), that attend together."""

    first: int
    end: int
    ends_only: bool = False  # above a prompt bridge: of prompts under it the last tokens alone
    begins_only: bool = False  # the first token of each alone


@dataclass
class Pass:
    """Where the tokens of each group lie, and what attention knows of the rows that some layers run."""

    rows: tuple[int, ...]  # where each group of rows ends
    starts: Tensor  # [rows + 1] where each row's tokens start, on the host
    device: torch.device
    graphs: Graphs
    wanted: tuple[Rows, ...] = ()  # those that attention needs metadata of
    metadata: dict[Rows, dict[str, Any]] = field(default_factory=dict)  # by layer's name
    slots: dict[Rows, dict[str, Tensor]] = field(default_factory=dict)

    def token(self, row: int) -> int:
        """Where a row's first token is."""
        return int(self.starts[row])

    def tokens(self, rows: Rows) -> slice:
        """Where rows' tokens lie: in the pass, or above a prompt bridge among those kept."""
        place = self.above if rows.ends_only else self.token
        return slice(place(rows.first), place(rows.end))

    @property
    def beginning(self) -> Rows:
        """Prompts whose first token is in the pass, and not their last one at once."""
        return Rows(self.rows[GOES_ON], self.rows[BEGINS_AND_ENDS], begins_only=True)

    @property
    def has_prompts(self) -> bool:
        """Under the schedule, that is."""
        return self.rows[ENDS] > 0

    @cached_property
    def begins(self) -> Tensor:
        """Their first tokens, of N."""
        return self.on_device(self.starts[self.beginning.first : self.beginning.end].long())

    @cached_property
    def kept(self) -> Tensor:
        """Tokens that go on above a prompt bridge, of N: all but those before the last one of prompts under it."""
        return self.on_device(self._kept)

    @cached_property
    def stopped(self) -> Tensor:
        """The others: prompt tokens that stop below it."""
        inside = torch.ones(self.token(self.rows[-1]), dtype=torch.bool)
        inside[self._kept] = False
        return self.on_device(inside.nonzero()[:, 0])

    @cached_property
    def _kept(self) -> Tensor:
        lasts = self.starts[self.rows[BEGINS] + 1 : self.rows[ENDS] + 1].long() - 1
        others = torch.arange(self.token(self.rows[ENDS]), self.token(self.rows[-1]))
        return torch.cat([lasts, others])

    def on_device(self, places: Tensor) -> Tensor:
        """Without waiting for what the device has to do yet."""
        if self.device.type != "cuda":
            return places.to(self.device)
        return places.pin_memory().to(self.device, non_blocking=True)

    def above(self, row: int) -> int:
        """Where a row's first token is among the kept ones."""
        first, ends = self.rows[BEGINS], self.rows[ENDS]
        return row - first if row <= ends else ends - first + self.token(row) - self.token(ends)

    def attention(self, rows: Rows) -> dict[str, Any]:
        """What vLLM's context of the pass says differently where attention layers see these rows alone."""
        if rows not in self.metadata:
            return {}
        return {"attn_metadata": self.metadata[rows], "slot_mapping": self.slots[rows]}


def groups_of(schedule: Schedule, batch: Any, scheduled: Sequence[int], requests: Any) -> list[int]:
    """The group of each row of vLLM's persistent batch, of which the pass takes so many tokens; `requests` by id."""
    groups = []
    for row, (request, count) in enumerate(zip(batch.req_ids, scheduled, strict=True)):
        computed, prompt = int(batch.num_computed_tokens_cpu[row]), int(batch.num_prompt_tokens[row])
        params = requests[request].sampling_params
        shared = shared_of(params)
        if any(computed < end < computed + count for end in (shared, prompt)):
            raise RuntimeError(f"a pass takes {count} tokens of row {request}, that do not run alike")
        if computed < shared or (params.extra_args or {}).get(FULL_DEPTH):
            groups.append(WHOLE)
        elif computed < prompt:
            begins, ends = computed == 0 and prompt > 1, computed + count == prompt
            groups.append((BEGINS_AND_ENDS if ends else BEGINS) if begins else (ENDS if ends else GOES_ON))
        elif count > 1:
            raise RuntimeError(f"a pass takes {count} generated tokens of row {request}, that do not run alike")
        else:
            groups.append(PLATEAU + schedule.plateau_at(computed - prompt))
    return groups


def sort_rows(batch: Any, groups: Sequence[int]) -> list[int]:
    """Put the rows of vLLM's persistent batch in the order of their groups, which are returned so."""
    order = sorted(range(len(groups)), key=groups.__getitem__)  # new place -> old row
    at = list(range(len(groups)))  # place -> old row that stands there now
    place = list(range(len(groups)))  # old row -> where it stands now
    for target, row in enumerate(order):
        if (source := place[row]) != target:
            batch.swap_states(target, source)
            other = at[target]
            at[target], at[source] = row, other
            place[row], place[other] = target, source
    return [groups[row] for row in order]


def part_of(common: Any, rows: Rows, current: Pass) -> Any:
    """vLLM's common metadata of some rows of a pass."""
    span = slice(rows.first, rows.end)
    tokens: slice | Tensor = current.tokens(rows)
    starts = common.query_start_loc[rows.first : rows.end + 1] - common.query_start_loc[rows.first]
    starts_cpu = common.query_start_loc_cpu[rows.first : rows.end + 1] - common.query_start_loc_cpu[rows.first]
    lengths, lengths_cpu = common.seq_lens[span], common.seq_lens_cpu_upper_bound[span]
    if rows.begins_only:
        tokens = current.begins
        starts_cpu = torch.arange(len(tokens) + 1, dtype=starts_cpu.dtype)
        starts = current.on_device(starts_cpu)
        lengths, lengths_cpu = torch.ones_like(lengths), torch.ones_like(lengths_cpu)
    if rows.ends_only:
        tokens = current.kept[tokens]
        above = [current.above(row) for row in range(rows.first, rows.end + 1)]
        starts_cpu = torch.tensor(above, dtype=starts_cpu.dtype) - above[0]
        starts = current.on_device(starts_cpu)
    return replace(
        common,
        query_start_loc=starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths_cpu,
        num_reqs=rows.end - rows.first,
        num_actual_tokens=int(starts_cpu[-1]),
        max_query_len=int(starts_cpu.diff().max()),
        block_table_tensor=common.block_table_tensor[span],
        slot_mapping=common.slot_mapping[tokens],
        positions=common.positions[tokens],
        is_prefilling=common.is_prefilling[span],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


_building: Pass | None = None  # the pass whose metadata are being built


def install() -> None:
    """Have vLLM's runner sort the rows of models that skip, and build what their attention needs."""
    if hasattr(GPUModelRunner, "skipdecode"):
        return
    GPUModelRunner.skipdecode = True
    reorder, build = GPUModelRunner._may_reorder_batch, GPUModelRunner._build_attention_metadata
    build_group = AttentionGroup.build_metadata

    def sorted_by_depth(runner: Any, scheduler_output: Any) -> None:
        model = runner.get_model()
        if not hasattr(model, "begin_pass"):
            reorder(runner, scheduler_output)
            return
        groups = [group for of_kind in runner.attn_groups for group in of_kind]
        names = {group.backend.get_name() for group in groups}
        if runner.reorder_batch_threshold is not None or not names.issubset(ATTENTION):
            raise ScheduleError(
                f"a schedule does not run with attention backend {', '.join(names)}: choose another one, "
                "--attention-backend FLASH_ATTN or TRITON_ATTN"
            )
        if any(group.kernel_block_size is not None for group in groups):  # then parts would share one block table
            raise ScheduleError("a schedule runs on blocks that are as attention has them: choose another --block-size")
        batch = runner.input_batch
        scheduled = [scheduler_output.num_scheduled_tokens[request] for request in batch.req_ids]
        model.graphs.dispatch = runner.cudagraph_dispatcher.dispatch
        runner.row_groups = sort_rows(batch, groups_of(model.schedule, batch, scheduled, runner.requests))

    def built_by_depth(runner: Any, *args: Any, **kwargs: Any) -> Any:
        global _building
        model, scheduled = runner.get_model(), kwargs.get("num_scheduled_tokens")
        if not hasattr(model, "begin_pass"):
            return build(runner, *args, **kwargs)
        model.current = None
        if scheduled is None:  # a dummy pass: all tokens run all layers
            return build(runner, *args, **kwargs)
        counts = [scheduled[request] for request in runner.input_batch.req_ids]
        _building = model.begin_pass(runner.row_groups, counts)
        try:
            return build(runner, *args, **kwargs)
        finally:
            _building = None

    def built_in_parts(group: Any, common: Any, *args: Any, **kwargs: Any) -> Any:
        whole = build_group(group, common, *args, **kwargs)
        if _building is not None:
            # With what it has built for one group of layers vLLM spares itself building for the next.
            group.get_metadata_builder(0).supports_update_block_table = False
            for rows in _building.wanted:
                part = part_of(common, rows, _building)
                slots = _building.graphs.padded(part.slot_mapping)
                built = build_group(group, part, *args, **kwargs)
                _building.metadata.setdefault(rows, {}).update(dict.fromkeys(group.layer_names, built))
                _building.slots.setdefault(rows, {}).update(dict.fromkeys(group.layer_names, slots))
        return whole

    GPUModelRunner._may_reorder_batch = sorted_by_depth
    GPUModelRunner._build_attention_metadata = built_by_depth
    AttentionGroup.build_metadata = built_in_parts
