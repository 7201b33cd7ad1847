"""The cache holds what later tokens attend to, and nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.decoding.stream
from engine import Engine, ModelShape, Plateau, Sampling, Schedule, Unit
from engine.forward.cache import ROWS, SPARE_BYTES, KVCache, rows_held, slots_for

SHAPE = ModelShape("llama", 6, 8, 4, 2, 3, 50, 100, attention_parameters=1, mlp_parameters=1, head_parameters=1)
SPANS = ((1, 2), (0, 3, 4, 5))


def make_cache(spans: Sequence[Sequence[int]] = SPANS) -> KVCache:
    return KVCache(SHAPE, spans, torch.float32, torch.device("cpu"))


@given(tokens=st.integers(1, 100_000))
def test_a_row_has_room_for_all_its_tokens_and_less_than_half_again(tokens: int) -> None:
    assert tokens <= slots_for(tokens) <= max(64, 1.5 * tokens)


@given(rows=st.integers(1, 600), row_bytes=st.integers(1, 1 << 30))
def test_a_block_of_long_rows_has_little_to_spare(rows: int, row_bytes: int) -> None:
    held = rows_held(rows, row_bytes)
    assert rows <= held <= rows_held(rows + 1, row_bytes)
    assert (held - rows) * row_bytes <= max(SPARE_BYTES, rows * row_bytes / 8)
    assert held < rows + ROWS


@settings(max_examples=60)
@given(data=st.data())
def test_rows_keep_what_was_written_whoever_comes_and_goes(data: st.DataObject) -> None:
    """Against a dictionary, with rows that enter, give back the first span, and leave, in any order."""
    cache = make_cache()
    held: dict[tuple[int, int], float] = {}  # (seat, layer) -> what is written all over the row
    sizes: dict[int, int] = {}
    for step in range(data.draw(st.integers(1, 40))):
        seat = data.draw(st.integers(0, 12))
        if seat not in sizes:
            sizes[seat] = data.draw(st.sampled_from([10, 64, 65, 200]))
            cache.enter({seat: sizes[seat]})
            for layer in range(SHAPE.layers):
                held[seat, layer] = 1.0 + step * SHAPE.layers + layer
                cache.row(seat, layer).fill_(held[seat, layer])
        elif data.draw(st.booleans()):
            cache.give_back(seat, 0)
            held = {key: value for key, value in held.items() if key[0] != seat or key[1] not in SPANS[0]}
        else:
            cache.leave(seat)
            del sizes[seat]
            held = {key: value for key, value in held.items() if key[0] != seat}
        for (row, layer), value in held.items():
            assert (cache.row(row, layer) == value).all()
        for index, span in enumerate(SPANS):
            wanted = sorted(row for row, layer in held if layer == span[0])
            assert sorted(seat for block in cache.blocks(index) for seat in block.seats) == wanted
            assert all(cache.holds(row, index) == (row in wanted) for row in sizes)
    needed = sum(SHAPE.cache_elements(slots_for(sizes[seat])) * 4 for seat, _ in held)
    spare = len(set(map(slots_for, sizes.values()))) * SHAPE.layers * 2 * ROWS * SHAPE.cache_elements(256) * 4
    assert needed <= cache.bytes <= needed + spare


def test_rows_that_enter_stand_after_those_that_are_there() -> None:
    cache = make_cache()
    cache.enter(dict.fromkeys([4, 2, 7], 30))
    cache.leave(4)
    cache.enter({9: 40})
    assert [block.seats for block in cache.blocks(0)] == [[7, 2, 9]]


def test_a_row_that_leaves_leaves_nothing_behind() -> None:
    """What has overflowed is no finite number, and none times zero is zero: it would reach the next row there."""
    cache = make_cache()
    cache.enter(dict.fromkeys(range(3), 30))
    for layer in range(SHAPE.layers):
        cache.row(1, layer).fill_(torch.nan)
        cache.row(2, layer).fill_(torch.inf)
    cache.leave(1)
    cache.leave(2)
    cache.enter({5: 30, 6: 30})
    assert not any(cache.row(seat, layer).any() for seat in (0, 5, 6) for layer in range(SHAPE.layers))


def test_an_empty_cache_takes_no_memory() -> None:
    cache = make_cache()
    cache.enter(dict.fromkeys(range(20), 500))
    assert cache.bytes == SHAPE.layers * 24 * SHAPE.cache_elements(512) * 4
    for seat in range(20):
        cache.leave(seat)
    assert cache.bytes == 0


def test_a_row_is_copied_in_the_layers_that_both_hold() -> None:
    ours, theirs = make_cache(), make_cache([range(6)])
    theirs.enter({3: 50})
    ours.enter({1: 50})
    ours.give_back(1, 0)
    for layer in range(SHAPE.layers):
        theirs.row(3, layer).fill_(7.0)
    ours.copy_row(theirs, 3, 1, 20)
    for layer in SPANS[1]:
        row = ours.row(1, layer)
        assert (row[:, :, :20] == 7).all()
        assert not row[:, :, 20:].any()


class WatchedCache(KVCache):
    """The real cache, which writes down what it holds in every pass."""

    history: list[tuple[set[int], int]]  # (layers, bytes)

    @property
    def bytes(self) -> int:
        held = super().bytes
        layers = {layer for index, span in enumerate(self.spans) if any(self.blocks(index)) for layer in span}
        self.history.append((layers, held))
        return held


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint(num_hidden_layers=6)), device="cpu")


def watch(tiny: Engine, schedule: Schedule, **sampling: Any) -> list[tuple[set[int], int]]:
    """Of passes over two rows."""
    WatchedCache.history = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.decoding.stream, "KVCache", WatchedCache)
        stream = tiny.decoding(Sampling(**sampling), schedule)
        stream.add([1, 2, 3], "a", 0)
        stream.add([4, 5], "b", 1)
        while stream.unfinished:
            WatchedCache.history.append(({-1}, 0))
            stream.step()
    starts = [place for place, (layers, _) in enumerate(WatchedCache.history) if layers == {-1}]
    return [WatchedCache.history[place + 1] for place in starts]  # after it those that have ended leave


def test_the_memory_of_a_layer_skipped_for_good_is_freed(tiny: Engine) -> None:
    order = (Unit("a", 1), Unit("m", 1), Unit("a", 2), Unit("m", 2), Unit("a", 3), Unit("a", 5))
    schedule = Schedule(6, order, (Plateau(0, 1), Plateau(2, 2), Plateau(3, 3), Plateau(5, 6)))
    history = watch(tiny, schedule, max_new_tokens=8, min_new_tokens=8)
    every = {0, 1, 2, 3, 4, 5}
    # Prompts run every layer; layer 1 is never decoded with.
    expected = [every, *[every - {1}] * 3, *[every - {1, 2}] * 2, *[{0, 4}] * 2]
    assert [layers for layers, _ in history] == expected
    assert [size for _, size in history] == [history[0][1] * len(layers) // 6 for layers in expected]
