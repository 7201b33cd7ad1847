"""The quality guard: which rows it looks at, what it measures, and when it is sure."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from engine_double import EchoBackend, NoEngineBackend
from fixture_types import Job, WriteParquet
from pydantic import ValidationError

from engine import BatchStats, Engine, Generation, Ledger, Sampling, Schedule
from engine.schedules import decays, orders
from pipeline.commits.commit import Totals, commit_unit
from pipeline.config import JobConfig
from pipeline.errors import JobStopped
from pipeline.reporting.audit import (
    CONFIDENCE,
    FEWEST,
    Auditor,
    audit_estimate,
    audit_facts,
    excess_nll,
    fails_audit,
    is_audited,
)
from pipeline.rows.row_generator import DeviceBroken, RowGenerator
from pipeline.rows.rows import ERROR, TOKENS, TRUNCATED, generate
from pipeline.run import run_job


def skipping(layers: int) -> Schedule:
    """Of the packaged model."""
    return Schedule.build(30, orders.lowest_first(30, 4), decays.constant(layers), horizon=0)


TWO_SKIPPED = skipping(2)
IDS = [f"part-0.parquet:{row}" for row in range(20_000)]
SAMPLING = Sampling(max_new_tokens=12)


def test_the_sample_is_the_fraction_and_the_same_every_time() -> None:
    audited = [is_audited(row, 0.01) for row in IDS]
    assert 150 < sum(audited) < 250
    assert [is_audited(row, 0.01) for row in IDS] == audited
    assert not any(is_audited(row, 0.0) for row in IDS)
    assert all(is_audited(row, 1.0) for row in IDS)
    assert all(is_audited(row, 0.05) for row, was in zip(IDS, audited, strict=True) if was)


def totals_of(rouge: list[float]) -> Totals:
    return Totals(audited=len(rouge), audit_rouge=sum(rouge), audit_rouge_squares=sum(value**2 for value in rouge))


def test_a_good_schedule_is_hardly_ever_stopped_and_a_bad_one_soon() -> None:
    """Looked at after every row, over 500 rows: outputs of mean 0.70 against minima of 0.70, 0.60, and 0.85."""
    draw = np.random.default_rng(0)
    stops: dict[float, list[int]] = {0.70: [], 0.60: [], 0.85: []}
    for _ in range(100):
        rouge = draw.beta(3.5, 1.5, 500).tolist()
        for minimum, found in stops.items():
            total = Totals()
            for count, value in enumerate(rouge, 1):
                total += totals_of([value])
                if fails_audit(total, minimum):
                    found.append(count)
                    break
    assert len(stops[0.70]) <= 6
    assert not stops[0.60]
    assert len(stops[0.85]) == 100
    assert np.median(stops[0.85]) < 80


def test_a_few_equal_rows_are_not_believed_at_once() -> None:
    assert not fails_audit(totals_of([0.0] * (FEWEST - 1)), 0.5)
    assert not fails_audit(totals_of([0.5] * FEWEST), 0.55)
    assert fails_audit(totals_of([0.0] * 2 * FEWEST), 0.5)
    assert not fails_audit(totals_of([0.9] * 1000), 0.5)
    assert CONFIDENCE > 2.5


def test_a_minimum_without_an_audit_is_a_mistake() -> None:
    with pytest.raises(ValidationError, match="needs an audit_fraction above 0"):
        JobConfig(input="in", output="out", min_audit_rouge=0.9)


def prepared(prompts: list[list[int] | None]) -> pa.Table:
    errors = [None if prompt else "text is null" for prompt in prompts]
    tokens = pa.array(prompts, pa.list_(pa.int32()))
    return pa.table({TOKENS: tokens, TRUNCATED: [False] * len(prompts), ERROR: pa.array(errors, pa.string())})


def audit_of(
    engine: Engine,
    schedule: Schedule,
    prompts: list[list[int] | None],
    fraction: float,
    on_batch: Callable[[BatchStats], None] | None = None,
) -> dict[str, float]:
    table, ids = prepared(prompts), IDS[: len(prompts)]
    answers: dict[int, Generation] = {}
    generate(table, ids, RowGenerator(engine, SAMPLING, schedule, 4), on_generation=answers.__setitem__)
    auditor = Auditor(engine, engine.tokenizer, engine.shape, SAMPLING, schedule, 4, fraction)
    return auditor.audit(table, ids, answers, on_batch)


@pytest.fixture(scope="module")
def prompts(packaged: Engine, texts: list[str]) -> list[list[int] | None]:
    """Five rows, one of them without a prompt."""
    short = [packaged.tokenizer.encode_chat(text) for text in sorted(texts, key=len)[:4]]
    return [*short[:2], None, *short[2:]]


def test_the_audit_tells_a_good_schedule_from_a_bad_one(packaged: Engine, prompts: list[list[int] | None]) -> None:
    good, bad = (audit_of(packaged, schedule, prompts, 1.0) for schedule in (TWO_SKIPPED, skipping(20)))
    assert good["audited"] == bad["audited"] == 4
    assert good["audit_rouge"] / 4 > 0.6 > 0.3 > bad["audit_rouge"] / 4
    assert good["audit_agreeing"] / good["audit_steps"] > 0.75 > 0.4 > bad["audit_agreeing"] / bad["audit_steps"]
    assert "(4 rows)" in audit_estimate(Totals(rows=5, **good))  # type: ignore[arg-type]
    excess = [excess_nll([Totals(**found)]) for found in (good, bad)]  # type: ignore[arg-type]
    assert excess[0] is not None
    assert excess[1] is not None
    assert -0.2 < excess[0].value < 0.5 < 1 < excess[1].value
    assert good["audit_full_nll"] == pytest.approx(bad["audit_full_nll"], rel=1e-3)
    assert good["audit_full_tokens"] == bad["audit_full_tokens"]


def test_what_an_audit_found_is_said_with_an_interval_once_there_are_units_enough() -> None:
    unit = Totals(audited=2, audit_rouge=1.6, audit_nll=30.0, audit_tokens=40, audit_full_nll=20.0,
                  audit_full_tokens=50, audit_repetition=0.2, audit_full_repetition=0.1, audit_unsupported=3,
                  audit_full_unsupported=1)  # fmt: skip
    other = replace(unit, audit_nll=40.0)
    assert audit_facts([]) == audit_facts([Totals(rows=7)]) == {}
    assert audit_facts([unit, other]) == {
        "excess NLL": "0.475 nats a token, of 4 audited rows",
        "ROUGE-L to full depth": "0.800",
        "repetition": "10.0%, full depth 5.0%",
        "length": "0.800 of full depth's",
        "unsupported claims": "1.50 numbers and names an answer that its prompt does not hold, full depth 0.50",
    }
    assert audit_facts([unit] * 8)["excess NLL"] == "0.350 [0.350, 0.350] nats a token, of 16 audited rows"
    assert audit_facts([unit, Totals(audited=9)])["excess NLL"] == "0.350 nats a token, of 2 audited rows"
    many = excess_nll([unit, other] * 5_000)
    assert many is not None
    assert many.value == pytest.approx(0.475)
    assert many.low <= 0.475 <= many.high


def test_the_audit_names_what_it_cost(packaged: Engine, prompts: list[list[int] | None]) -> None:
    told: list[BatchStats] = []
    found = audit_of(packaged, TWO_SKIPPED, prompts, 1.0, told.append)
    assert sum(stats.samples for stats in told) == 4
    expected, ledger = 0, Ledger(packaged.shape, TWO_SKIPPED)
    full = [prompt for prompt in prompts if prompt]
    for generation in packaged.generate(full, SAMPLING):
        n, g = generation.prompt_tokens, generation.generated_tokens
        whole = ledger.full_depth.prompt(n) + ledger.full_depth.decode(n, g)
        # Generated, then passed again at both depths, with our answer after the same prompt and both first tokens.
        expected += 2 * whole + ledger.decode(n, g)
        [ours] = packaged.generate([full[generation.index]], SAMPLING, TWO_SKIPPED)
        expected += ledger.full_depth.decode(n, ours.generated_tokens)
    assert found["flops_audit"] == expected


def test_samples_of_a_row_are_audited_one_by_one(packaged: Engine, prompts: list[list[int] | None]) -> None:
    drawn, fraction = replace(SAMPLING, temperature=1.0, samples_per_prompt=3, seed=4), 0.4
    table, ids, answers = prepared(prompts), IDS[:5], dict[int, Generation]()
    generate(table, ids, RowGenerator(packaged, drawn, TWO_SKIPPED, 4), on_generation=answers.__setitem__)
    names = [f"{name}\0{sample}" if sample else name for name in ids for sample in range(3)]
    chosen = [place for place in answers if is_audited(names[place], fraction)]
    assert {place % 3 for place in chosen} > {0}
    found = Auditor(packaged, packaged.tokenizer, packaged.shape, drawn, TWO_SKIPPED, 4, fraction).audit(
        table, ids, answers
    )
    assert found["audited"] == len(chosen)
    assert found["audit_tokens"] == sum(answers[place].generated_tokens for place in chosen)
    single = replace(drawn, samples_per_prompt=1)
    whole = packaged.generate([prompts[p // 3] or [] for p in chosen], single, None, 4, [names[p] for p in chosen])
    assert found["audit_full_tokens"] == sum(each.generated_tokens for each in whole)


def test_nothing_is_audited_at_full_depth_or_outside_the_sample(
    packaged: Engine, prompts: list[list[int] | None]
) -> None:
    assert audit_of(packaged, Schedule.full_depth(30), prompts, 1.0) == {}
    assert audit_of(packaged, TWO_SKIPPED, prompts, 0.0) == {}


def test_what_an_audit_needs_is_loaded_before_its_first_row() -> None:
    """Else a replica without the memory for it would die of each row that is audited."""
    asked: list[object] = []

    class Asked:
        def score(self, *given: object) -> None:
            asked.append(given)

    shape = replace(EchoBackend().shape(JobConfig(input="in", output="out")), layers=30)
    for schedule, fraction in ((Schedule.full_depth(30), 1.0), (TWO_SKIPPED, 0.0), (TWO_SKIPPED, 0.01)):
        Auditor(Asked(), None, shape, SAMPLING, schedule, 8, fraction).begin()  # type: ignore[arg-type]
    assert asked == [([[0]], [[0]], [TWO_SKIPPED])]


class Failing:
    """An engine that fails as it is told."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def generate(self, *_: object) -> object:
        raise self._error

    score = generate


def failing(error: Exception, packaged: Engine) -> Auditor:
    broken: Any = Failing(error)
    return Auditor(broken, packaged.tokenizer, packaged.shape, SAMPLING, TWO_SKIPPED, 4, 1.0)


def written(packaged: Engine, prompts: list[list[int]]) -> dict[int, Generation]:
    return dict(enumerate(packaged.generate(prompts, Sampling(max_new_tokens=1), batch_size=1)))


@pytest.mark.parametrize("error", [MemoryError(), ValueError("odd prompt")])
def test_an_audit_that_fails_costs_no_output(packaged: Engine, error: Exception) -> None:
    auditor, answers = failing(error, packaged), written(packaged, [[1], [2]])
    assert auditor.audit(prepared([[1], [2]]), IDS[:2], answers) == {}


def test_a_broken_device_is_not_hidden(packaged: Engine) -> None:
    auditor = failing(RuntimeError("CUDA error: an illegal memory access was encountered"), packaged)
    with pytest.raises(DeviceBroken):
        auditor.audit(prepared([[1], [2]]), IDS[:2], written(packaged, [[1], [2]]))


def test_an_audit_of_no_numbers_costs_no_output(packaged: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in half precision logits may overflow: a record that holds them could not be written."""
    auditor = Auditor(packaged, packaged.tokenizer, packaged.shape, SAMPLING, TWO_SKIPPED, 4, 1.0)
    monkeypatch.setattr(auditor, "_compare", lambda *_: {"audited": 2, "audit_nll": float("nan")})
    assert auditor.audit(prepared([[1], [2]]), IDS[:2], written(packaged, [[1], [2]])) == {}


@pytest.mark.usefixtures("inline")
def test_starting_a_job_again_accepts_no_audit_that_it_was_stopped_for(
    job: Job,
    tmp_path: Path,
    write_parquet: WriteParquet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All units may have been in flight, and are committed by then."""

    def audited(storage: Any, unit: Any, output: Any, run: str, cost: dict[str, float]) -> Any:
        found = {"audited": unit.rows, "audit_rouge": 0.1 * unit.rows, "audit_rouge_squares": 0.01 * unit.rows}
        return commit_unit(storage, unit, output, run, cost | found)

    monkeypatch.setattr("inline_session.commit_unit", audited)
    write_parquet(tmp_path / "in/a.parquet", {"text": [f"row {row}" for row in range(12)]})
    config = job(audit_fraction=1, min_audit_rouge=0.8, rows_per_unit=4)
    for backend in (EchoBackend(), NoEngineBackend()):
        with pytest.raises(JobStopped, match=r"too far from full depth: ROUGE-L .* 0\.100 .* after 12 of 12 rows"):
            run_job(config, backend)
        assert not Path(config.output, "_SUCCESS.json").exists()
    assert run_job(job(audit_fraction=1, min_audit_rouge=0.1, rows_per_unit=4), NoEngineBackend()).totals.rows == 12
