"""Whatever some rows do to the engine, the others are delivered, and each at its own place."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from engine_double import Echo
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine import BatchStats, Engine, Generation, ModelError, Sampling, Schedule, ScheduleError
from pipeline.rows.row_generator import (
    MOST_QUARANTINED,
    DeviceBroken,
    RowGenerator,
    TooManyRowsFailed,
    is_device_broken,
    is_out_of_memory,
)


@dataclass(frozen=True)
class Moody(Echo):
    """Raises for batches that hold certain prompts, or too many of them."""

    raising: dict[int, Exception] = field(default_factory=dict)  # by prompt length
    room: int = 10_000  # rows that fit in memory
    batches: list[int] = field(default_factory=list)  # sizes of those that were tried

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | None = None,
        schedule: Schedule | None = None,
        batch_size: int = 32,
        sample_ids: Sequence[str] | None = None,
        on_batch: Callable[[BatchStats], None] | None = None,
    ) -> Iterator[Generation]:
        assert sample_ids is not None
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            self.batches.append(len(batch))
            if len(batch) > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            for prompt in batch:
                if len(prompt) in self.raising:
                    raise self.raising[len(prompt)]
            ids = sample_ids[start : start + batch_size]
            for generation in super().generate(batch, sampling, schedule, len(batch), ids, on_batch):
                yield Generation(**{**_fields(generation), "index": start + generation.index})


def _fields(generation: Generation) -> dict[str, object]:
    return {name: getattr(generation, name) for name in Generation.__slots__}


def outcome(
    engine: Moody, lengths: Sequence[int], batch_size: int | Literal["auto"] = 4, samples: int = 1
) -> tuple[RowGenerator, list[int | str]]:
    """For each prompt's samples its length as the generation tells it, or the error."""
    sampling = Sampling(max_new_tokens=100, temperature=1.0, samples_per_prompt=samples)
    generator = RowGenerator(engine, sampling, None, batch_size)
    found = generator.generate([[65] * length for length in lengths], [str(n) for n in range(len(lengths))])
    return generator, [row if isinstance(row, str) else len(row.tokens) for row in found]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40, unique=True),
    bad=st.sets(st.integers(1, 40), max_size=5),
    batch_size=st.integers(1, 9),
    samples=st.integers(1, 3),
)
def test_rows_that_raise_have_their_error_and_all_others_their_generation(
    lengths: list[int], bad: set[int], batch_size: int, samples: int
) -> None:
    engine = Moody(raising={length: ValueError(f"length {length}") for length in bad})
    if 1 in bad and set(lengths) <= bad:  # and so fails a prompt of one token
        with pytest.raises(TooManyRowsFailed):
            outcome(engine, lengths, batch_size, samples)
        return
    _, rows = outcome(engine, lengths, batch_size, samples)
    sampled = [length for length in lengths for _ in range(samples)]
    assert rows == [f"ValueError: length {length}" if length in bad else length for length in sampled]


@given(
    rows=st.integers(1, 30), batch_size=st.integers(1, 32), room=st.integers(1, 32), samples=st.sampled_from([1, 1, 5])
)
def test_out_of_memory_halves_the_batch_and_loses_nothing(rows: int, batch_size: int, room: int, samples: int) -> None:
    engine = Moody(room=room)
    generator, found = outcome(engine, range(1, rows + 1), batch_size, samples)
    assert found == [row for row in range(1, rows + 1) for _ in range(samples)]
    assert generator.batch_size <= batch_size
    if rows >= batch_size > room:
        assert generator.batch_size < batch_size  # later units don't run out of memory again at once


@pytest.mark.parametrize(
    ("batch_size", "then"), [(8, ("4 rows", "2 rows")), ("auto", ("50% of what should fit", "25% of what should fit"))]
)
def test_each_time_that_memory_runs_out_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture, batch_size: int | Literal["auto"], then: tuple[str, str]
) -> None:
    outcome(Moody(room=2), range(1, 9), batch_size)
    assert caplog.messages == [
        f"out of memory: going on with batches of {size} rows, then of {rest}"
        for size, rest in zip((4, 2), then, strict=True)
    ]


def test_auto_takes_what_fits_the_longest_prompt_of_each_call_and_less_where_that_was_too_much() -> None:
    engine = Moody(room=100)
    generator, found = outcome(engine, [50] * 300, "auto")  # the double says 200 rows
    assert found == [50] * 300
    assert engine.batches == [200, 100, 100, 100]
    engine.batches.clear()
    generator.generate([[65] * 50] * 150, [str(n) for n in range(150)])
    assert engine.batches == [100, 50]
    engine.batches.clear()
    generator.generate([[65] * 2000] * 7, [str(n) for n in range(7)])  # 5, it says
    assert engine.batches == [2, 2, 2, 1]
    engine.batches.clear()
    generator.generate([[65] * 50] * 100, [str(n) for n in range(100)])
    assert engine.batches == [100]


@dataclass(frozen=True)
class Joined(Moody):
    """Says that what fits is the size of the stream that it has open."""

    def fitting_batch_size(
        self, prompt_tokens: int, sampling: Sampling | None = None, schedule: Schedule | None = None
    ) -> int:
        return self.batches[-1] if self.batches else super().fitting_batch_size(prompt_tokens)


def test_rows_that_join_a_stream_do_so_at_its_size_after_memory_ran_out_too() -> None:
    engine = Joined(room=100)
    generator, _ = outcome(engine, [50] * 200, "auto")
    assert engine.batches == [200, 100, 100]
    engine.batches.clear()
    for _ in range(3):
        generator.generate([[65] * 50] * 200, [str(n) for n in range(200)])
    assert engine.batches == [100] * 6


def test_memory_that_does_not_do_for_one_row_makes_that_row_an_error() -> None:
    engine = Moody(raising={7: MemoryError("no memory")})
    _, rows = outcome(engine, [5, 6, 7, 8])
    assert rows == [5, 6, "MemoryError: no memory", 8]


def test_a_row_whose_logits_are_not_numbers_is_an_error(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = shutil.copytree(make_checkpoint(tie_word_embeddings=False), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    engine = Engine.load(str(model), device="cpu")
    three = Sampling(min_new_tokens=3, max_new_tokens=3)
    first, bad, last = RowGenerator(engine, three, None, 4).generate([[5, 6], [5, 7, 6], [8]], ["a", "b", "c"])
    alone = [generation.tokens for generation in engine.generate([[5, 6], [8]], three)]
    assert [row.tokens for row in (first, last) if isinstance(row, Generation)] == alone
    assert bad == "FloatingPointError: the model's logits are not numbers: if its states overflow, another dtype helps"


def test_an_error_that_quotes_half_a_surrogate_pair_is_written_out() -> None:
    _, rows = outcome(Moody(raising={7: ValueError("no \ud800")}), [5, 7])
    assert rows == [5, "ValueError: no \\ud800"]


def test_finished_batches_are_not_generated_again() -> None:
    engine = Moody(raising={9: ValueError("nine")})
    outcome(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 4)
    assert engine.batches == [4, 4, 4, 2, 1, 1, 2]


def test_more_bad_rows_than_a_corpus_has_are_the_units_failure() -> None:
    engine = Moody(raising={length: ValueError("bad") for length in range(1, MOST_QUARANTINED + 2)})
    with pytest.raises(TooManyRowsFailed, match="the last of them with ValueError: bad"):
        outcome(engine, range(1, 60))


def test_bad_rows_among_many_good_ones_are_their_own_failure_however_many_there_are() -> None:
    bad = range(5, 400, 10)
    _, found = outcome(Moody(raising={length: ValueError("bad") for length in bad}), range(1, 401))
    assert found == ["ValueError: bad" if length in bad else min(length, 100) for length in range(1, 401)]


def test_an_engine_that_goes_bad_late_is_not_its_rows_failure() -> None:
    bad = {length: ValueError("bad") for length in range(201, 257)}
    with pytest.raises(TooManyRowsFailed, match="17 rows fail"):
        outcome(Moody(raising=bad), range(1, 257))


def one_row(generator: RowGenerator, length: int) -> int | str:
    """What a call with this row alone gives for it."""
    (row,) = generator.generate([[65] * length], ["0"])
    return row if isinstance(row, str) else len(row.tokens)


def failing(*lengths: int) -> RowGenerator:
    engine = Moody(raising={length: ValueError("bad") for length in lengths})
    return RowGenerator(engine, Sampling(max_new_tokens=100), None, 4)


def test_an_engine_that_goes_bad_is_not_the_failure_of_rows_that_come_one_by_one_and_may_recover() -> None:
    generator = failing(7)
    for _ in range(2):
        assert one_row(generator, 1) == 1
        assert [one_row(generator, 7) for _ in range(MOST_QUARANTINED)] == ["ValueError: bad"] * MOST_QUARANTINED
        with pytest.raises(TooManyRowsFailed, match="17 rows fail"):
            one_row(generator, 7)


def test_rows_that_failed_together_may_come_again_one_by_one_for_their_own_errors() -> None:
    generator = failing(*range(2, 60))
    for first in range(2, 40, MOST_QUARANTINED + 1):
        lengths = range(first, first + MOST_QUARANTINED + 1)
        with pytest.raises(TooManyRowsFailed):
            generator.generate([[65] * length for length in lengths], list(map(str, lengths)))
        assert [one_row(generator, n) for n in lengths[1:]] == ["ValueError: bad"] * MOST_QUARANTINED


def test_bad_rows_may_be_all_that_a_unit_has_where_the_engine_answers_others() -> None:
    generator = failing(7, 8)
    pair = [[65] * 7, [65] * 8]
    assert generator.generate(pair, ["0", "1"]) == ["ValueError: bad"] * 2
    for _ in range(MOST_QUARANTINED // 2 - 1):
        generator.generate(pair, ["0", "1"])
    with pytest.raises(TooManyRowsFailed, match="18 rows fail"):  # without one that does not
        generator.generate(pair, ["0", "1"])
    assert one_row(generator, 6) == 6
    assert generator.generate(pair, ["0", "1"]) == ["ValueError: bad"] * 2


@pytest.mark.parametrize("rows", [1, 2])
def test_an_engine_that_answers_nothing_is_not_the_failure_of_a_single_row(rows: int) -> None:
    generator = failing(1, 7)
    with pytest.raises(TooManyRowsFailed, match=f"{rows} rows fail, the last of them with ValueError: bad"):
        generator.generate([[65] * 7] * rows, ["0", "1"][:rows])


def test_samples_that_ended_before_one_raised_are_kept() -> None:
    class BadSample(Echo):
        """The last sample comes first."""

        def generate(self, prompts: Sequence[str | Sequence[int]], *how: Any) -> Iterator[Generation]:
            for generation in super().generate(prompts, *how):
                if prompts[generation.index] == [66] and generation.sample == 1:
                    raise FloatingPointError("not numbers")
                yield generation

    def asked(*prompts: list[int]) -> list[str]:
        sampling = Sampling(temperature=1.0, samples_per_prompt=4)
        found = RowGenerator(BadSample(), sampling, None, 8).generate(prompts, list(map(str, range(len(prompts)))))
        return [row if isinstance(row, str) else f"{row.sample} {row.text}" for row in found]

    bad = [*["FloatingPointError: not numbers"] * 2, "2 B", "3 B"]
    assert asked([65], [66], [67]) == ["0 A", "1 A", "2 A", "3 A", *bad, "0 C", "1 C", "2 C", "3 C"]
    assert asked([66], [66]) == [*bad, *bad]


def test_a_device_that_broke_is_no_rows_error() -> None:
    engine = Moody(raising={2: RuntimeError("CUDA error: device-side assert triggered")})
    with pytest.raises(DeviceBroken, match="device-side assert"):
        outcome(engine, [1, 2, 3])


@pytest.mark.parametrize(
    ("error", "memory", "device"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True, False),
        (MemoryError(), True, False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), True, False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, True),
        (RuntimeError("shape mismatch"), False, False),
        (ValueError("CUDA error"), False, False),
    ],
)
def test_what_torch_says_is_understood(error: Exception, memory: bool, device: bool) -> None:
    assert (is_out_of_memory(error), is_device_broken(error)) == (memory, device)


@pytest.mark.parametrize("kind", [ModelError, ScheduleError])
def test_an_engine_that_does_not_start_again_is_no_rows_error(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="does not start"):
        outcome(Moody(raising={2: kind("does not start")}), [2])
