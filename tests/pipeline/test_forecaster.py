"""The plan before a run: what it says comes true, and it says where its figures come from."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pytest
from engine_double import Echo, EchoBackend, NoEngineBackend

from engine import Ledger, Schedule
from pipeline.commits.commit import Totals, commit_unit
from pipeline.config import JobConfig
from pipeline.dataset.config import DatasetConfig
from pipeline.errors import JobError, NothingToDo
from pipeline.execution.stages import Task
from pipeline.forecaster import _margin, forecast_run
from pipeline.inputs.work import make_plan
from pipeline.preparing.preparation import absolute_paths
from pipeline.preparing.run_record import claim_output, describe_run
from pipeline.reporting.bill import bill
from pipeline.reporting.forecast import Forecast, against_actual, read_forecast, write_forecast
from pipeline.rows.row_generator import RowGenerator
from pipeline.rows.rows import generate
from pipeline.rows.template import PromptTemplate
from pipeline.storage.storage import Storage

Job = Callable[..., JobConfig]
ROWS = 60


@pytest.fixture
def planned(job: Job, write_parquet: Callable[..., Path], tmp_path: Path) -> Job:
    """A job over 60 texts of 1 to 60 bytes in two files, at half depth from the second step on."""
    for file in range(2):
        texts = ["x" * length for length in range(1 + 30 * file, 31 + 30 * file)]
        write_parquet(tmp_path / f"in/{file}.parquet", {"text": texts}, [7, 23])
    schedule = Schedule.from_dict(
        {"format": 1, "layers": 4, "skip_order": ["a2", "m2", "a3", "m3"], "skipped": [[0, 0], [1, 4]]}
    )
    (tmp_path / "schedule.json").write_text(schedule.to_json())

    def make(**options: object) -> JobConfig:
        return job(**{"schedule": str(tmp_path / "schedule.json"), "max_new_tokens": 16, **options})

    return make


def run_to_end(config: JobConfig) -> Totals:
    """The job's stages and commits in this process, without Ray."""
    backend, config = EchoBackend(), absolute_paths(config)
    template = PromptTemplate(config.prompt, config.system, config.prompt_format, config.overlong)
    plan = make_plan(config, template)
    schedule = Schedule.read(str(config.schedule))
    claim = claim_output(config.output_storage(), describe_run(config, plan, schedule, backend.identity(config)))
    task = Task(config, backend, template, schedule, plan.read_columns, plan.kept, 4080, claim.run)
    cost, totals = {"seconds": 2.0, "flops_audit": 1000}, Totals()
    for span in plan.spans(plan.units):
        for unit, prepared in task.prepared(span):
            ids = [str(row) for row in range(unit.rows)]
            output = generate(prepared, ids, RowGenerator(Echo(), config.sampling(), schedule, 8))
            totals += commit_unit(config.output_storage(), unit, output, claim.run, cost).totals
    return totals


def test_a_plan_over_all_rows_has_the_ledgers_exact_figures_and_loads_no_model(planned: Job) -> None:
    config = planned(plan_output_tokens=5)
    forecast = forecast_run(config, NoEngineBackend())

    ledger = Ledger(EchoBackend().shape(config), Schedule.read(str(config.schedule)))
    lengths = range(1, ROWS + 1)
    assert (forecast.rows, forecast.prompt_tokens, forecast.output_tokens) == (ROWS, sum(lengths), 5 * ROWS)
    assert forecast.flops_prompt == sum(map(ledger.prompt, lengths))
    assert forecast.flops_decode == sum(ledger.decode(length, 5) for length in lengths)
    full = sum(ledger.full_depth.decode(length, 5) for length in lengths)
    assert forecast.flops_full_depth == forecast.flops_prompt + full
    assert forecast.decode_share == pytest.approx(full / forecast.flops_full_depth)
    assert forecast.prompt_tokens_margin == 0
    assert 1 < forecast.sample_speedup < forecast.decode_speedup


def test_a_sample_stands_for_all_rows_within_its_stated_margin(planned: Job) -> None:
    forecast = forecast_run(planned(plan_rows=48), NoEngineBackend())
    actual = sum(range(1, ROWS + 1))
    assert forecast.sampled_rows == 48
    assert forecast.prompt_tokens_margin is not None
    assert 0 < forecast.prompt_tokens_margin < 0.5
    assert abs(forecast.prompt_tokens - actual) < 2 * forecast.prompt_tokens_margin * actual


def test_samples_of_a_row_tell_no_more_of_the_others(planned: Job) -> None:
    def forecast(samples: int, **options: object) -> Forecast:
        options |= {"temperature": 1.0, "rows_per_unit": 15}  # of 5 rows or 15, of which the same are drawn
        of_samples = planned(**options).model_dump() | {"samples_per_prompt": samples}
        return forecast_run(DatasetConfig(**of_samples), NoEngineBackend())

    once, thrice = (forecast(samples, plan_rows=32) for samples in (1, 3))
    assert thrice.prompt_tokens == pytest.approx(3 * once.prompt_tokens, abs=3)
    assert thrice.prompt_tokens_margin == once.prompt_tokens_margin
    whole, single = forecast(3), forecast(1)
    assert (whole.sampled_rows, whole.rows, whole.prompt_tokens_margin) == (ROWS, 3 * ROWS, 0)
    assert (whole.flops_prompt, whole.flops_decode) == (single.flops_prompt, 3 * single.flops_decode)


@pytest.mark.parametrize(("batch_size", "passes"), [(2, 4), (7, 1), (3, 3), ("auto", 1)])
def test_a_prompt_is_planned_as_often_as_its_samples_fill_a_batch(
    planned: Job, batch_size: int | str, passes: int
) -> None:
    options = planned(temperature=1.0, plan_output_tokens=5, batch_size=batch_size, audit_fraction=0.1).model_dump()
    once, often = (forecast_run(DatasetConfig(**options, samples_per_prompt=n), NoEngineBackend()) for n in (1, 7))
    assert often.flops_prompt == passes * once.flops_prompt
    assert often.flops_audit == pytest.approx(7 * once.flops_audit)


def test_samples_of_a_row_are_planned_as_they_run(planned: Job) -> None:
    options = planned(audit_fraction=0.5, plan_prompts=8).model_dump() | {"temperature": 1.0, "samples_per_prompt": 3}
    config = DatasetConfig(**options)
    forecast = forecast_run(config, EchoBackend())
    totals = run_to_end(config)
    assert (totals.rows, totals.prompt_tokens) == (forecast.rows, forecast.prompt_tokens) == (3 * ROWS, 3 * 1830)
    assert totals.flops_prompt == 100 * 1830, "each prompt is paid for once"
    assert "8 sampled prompts answered 2 times over" in forecast.output_source
    prompts = forecast.flops_full_depth - forecast.flops_decode_full_depth
    decode = 3 * forecast.flops_decode_full_depth + forecast.flops_decode
    assert forecast.flops_audit == round(0.5 * (3 * 2 * prompts + decode)), "an audit computes each sample's prompt"


def test_one_run_of_neighbours_says_nothing_of_the_others(planned: Job) -> None:
    forecast = forecast_run(planned(plan_rows=4), NoEngineBackend())
    assert forecast.prompt_tokens_margin is None
    assert "(margin unknown, from 4 rows)" in forecast.facts()["prompt tokens"]


@pytest.mark.parametrize("count", [2, 3, 8, 14])
def test_the_margin_of_few_draws_covers_their_mean_in_95_of_100_cases(count: int) -> None:
    draw, covered = random.Random(0), 0
    for _ in range(2000):
        drawn = [draw.gauss(100, 30) for _ in range(count)]
        margin = _margin([[one] for one in drawn], None)
        assert margin is not None
        covered += abs(fmean(drawn) - 100) <= margin * abs(fmean(drawn))
    assert 0.93 <= covered / 2000 <= 0.97


def test_the_margin_covers_the_mean_of_rows_whose_neighbours_are_alike() -> None:
    rows = list(range(100, 4100))
    runs = [rows[start : start + 16] for start in range(0, len(rows), 16)]
    actual, draw, covered = sum(rows) / len(rows), random.Random(0), 0
    for _ in range(300):
        drawn = draw.sample(runs, 20)
        mean = sum(map(sum, drawn)) / 320
        margin = _margin(drawn, len(rows))
        assert margin is not None
        covered += abs(mean - actual) <= margin * mean
    assert 0.9 < covered / 300 < 0.98
    assert _margin(runs, len(rows)) == 0
    assert (_margin(runs[:20], None) or 0) > (_margin(runs[:20], len(rows)) or 0) > 0
    assert _margin(runs[:1], len(rows)) is None


def test_without_anything_known_every_row_reaches_the_longest_output_and_time_is_unknown(planned: Job) -> None:
    forecast = forecast_run(planned(price_per_gpu_hour=2.0), NoEngineBackend())
    assert forecast.output_tokens == 16 * ROWS
    assert "max_new_tokens" in forecast.output_source
    assert forecast.seconds is None
    assert forecast.cost is None
    assert "--plan-prompts" in forecast.facts()["replica-hours"]


def test_a_plan_says_that_audits_come_on_top(planned: Job) -> None:
    config = planned(audit_fraction=0.05, plan_output_tokens=5)
    forecast = forecast_run(config, NoEngineBackend())
    ledger = Ledger(EchoBackend().shape(config), Schedule.read(str(config.schedule)))
    full = ledger.full_depth
    wanted = sum(2 * full.prompt(n) + 3 * full.decode(n, 5) + ledger.decode(n, 5) for n in range(1, ROWS + 1)) / 20
    assert forecast.flops_audit == pytest.approx(wanted)
    share = forecast.flops_audit / forecast.flops
    assert forecast.facts()["audits"].startswith("come on top, of 5.0% of the rows: ")
    assert forecast.facts()["audits"].endswith(f" T FLOPs, {share:.1%} of this run's")
    assert "audits" not in forecast_run(planned(), NoEngineBackend()).facts()
    at_full_depth = planned(audit_fraction=0.05, schedule=None)
    assert "audits" not in forecast_run(at_full_depth, NoEngineBackend()).facts()


def test_answers_to_sampled_prompts_give_lengths_and_speed(planned: Job) -> None:
    forecast = forecast_run(planned(plan_prompts=12, price_per_gpu_hour=3.6), EchoBackend(Echo(seconds_per_batch=0.01)))
    assert 1 <= forecast.output_tokens / ROWS < 16
    assert forecast.seconds is not None
    assert forecast.seconds_full_depth is not None
    assert 0 < forecast.seconds < forecast.seconds_full_depth
    assert forecast.cost == pytest.approx(forecast.seconds / 1000)
    assert "12 sampled prompts" in forecast.speed_source


def test_prompts_that_cannot_be_answered_are_one_sentence(planned: Job) -> None:
    class Refuses(Echo):
        def before(self, prompts: Sequence[str | Sequence[int]]) -> None:
            raise ValueError("no")

    with pytest.raises(JobError, match=r"the sampled prompts could not be answered: .* rows fail, .* ValueError: no"):
        forecast_run(planned(plan_prompts=4), EchoBackend(Refuses()))


def test_rows_that_cannot_be_read_are_left_out_of_the_sample(
    planned: Job, write_parquet: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job itself fails their units and does all else."""
    far = pa.array([253402300799 * 10**6] * 4, pa.timestamp("us"))  # 9999-12-31, which nanoseconds do not reach
    write_parquet(tmp_path / "in/2.parquet", {"text": ["far"] * 4, "at": far})
    write_parquet(tmp_path / "in/3.parquet", {"text": ["near"] * 4, "at": pa.array([1] * 4, pa.timestamp("ns"))})
    forecast = forecast_run(planned(keep_columns=["at"]), NoEngineBackend())
    assert (forecast.rows, forecast.sampled_rows) == (ROWS + 8, ROWS + 4)
    assert "left out rows of" in caplog.text
    assert "2.parquet" in caplog.text
    write_parquet(tmp_path / "far/0.parquet", {"text": ["far"] * 4, "at": far})
    write_parquet(tmp_path / "far/1.parquet", pa.schema({"text": pa.string(), "at": pa.timestamp("ns")}).empty_table())
    with pytest.raises(JobError, match=r"no rows can be read; of '.*far/0.parquet'"):
        forecast_run(planned(input=str(tmp_path / "far"), keep_columns=["at"]), NoEngineBackend())


def test_a_file_none_of_which_can_be_read_is_given_up_soon(
    planned: Job, write_parquet: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    far = pa.array([253402300799 * 10**6] * 400, pa.timestamp("us"))
    write_parquet(tmp_path / "far/0.parquet", {"text": ["far"] * 400, "at": far})
    write_parquet(tmp_path / "far/1.parquet", pa.schema({"text": pa.string(), "at": pa.timestamp("ns")}).empty_table())
    with pytest.raises(JobError, match="no rows can be read"):
        forecast_run(planned(input=str(tmp_path / "far"), keep_columns=["at"]), NoEngineBackend())
    assert caplog.text.count("left out rows of") == 3  # of 25 times that a few are drawn


def test_prompts_to_answer_are_spread_over_the_sample(planned: Job) -> None:
    asked: list[int] = []

    class Asked(Echo):
        def before(self, prompts: Sequence[str | Sequence[int]]) -> None:
            asked.extend(map(len, prompts))

    forecast_run(planned(plan_prompts=4, batch_size=4), EchoBackend(Asked()))
    first, *others = asked
    assert len(others) == 4
    assert first == others[0]
    assert all(abs(one - other) > 1 for one, other in pairwise(others))
    asked.clear()
    forecast_run(planned(plan_prompts=500), EchoBackend(Asked()))
    assert sorted(asked[1:]) == list(range(1, ROWS + 1))


def test_few_prompts_are_answered_until_a_batch_is_full(planned: Job) -> None:
    """Fewer rows cost more each; and one is answered first, since what a process does once is not to count."""
    batches: list[list[int]] = []

    class Asked(Echo):
        def before(self, prompts: Sequence[str | Sequence[int]]) -> None:
            batches.append(list(map(len, prompts)))

    forecast = forecast_run(planned(plan_prompts=3, batch_size=13), EchoBackend(Asked()))
    once, batch = batches
    assert once == batch[:1]
    assert sorted(batch) == sorted(4 * batch[:3])
    assert forecast.speed_source.startswith("3 sampled prompts answered 4 times over in ")
    assert re.fullmatch(r"± \d+\.\d%, from 3 sampled prompts answered 4 times over", forecast.output_source)
    alone = forecast_run(planned(plan_prompts=1, batch_size=1), EchoBackend(Echo()))
    assert alone.output_source == "1 sampled prompt answered"
    batches.clear()
    in_vllm = forecast_run(planned(plan_prompts=3, batch_size=13, engine="vllm"), EchoBackend(Asked()))
    assert len(set(batches[1])) == 13, "vLLM would find prompts that come again in its cache"
    assert in_vllm.speed_source.startswith("13 sampled prompts answered in ")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_to_all_rows_are_certain_unless_they_are_drawn(planned: Job, temperature: float) -> None:
    forecast = forecast_run(planned(plan_prompts=ROWS, temperature=temperature), EchoBackend(Echo()))
    assert forecast.output_source.startswith("± 0.0%, from 60 sampled prompts") == (temperature == 0)


def test_a_run_of_the_same_answers_in_the_output_gives_lengths_and_speed(planned: Job) -> None:
    config = planned()
    totals = run_to_end(config)
    forecast = forecast_run(config, NoEngineBackend())
    assert forecast.output_tokens == pytest.approx(totals.generated_tokens, rel=0.01)
    assert forecast.seconds == pytest.approx(totals.seconds / (totals.flops + totals.flops_audit) * forecast.flops)
    assert "60 rows" in forecast.output_source
    other = forecast_run(planned(prompt="Say: {text}"), NoEngineBackend())
    assert "max_new_tokens" in other.output_source


def test_a_stored_plan_is_compared_with_the_run_it_was_made_for_alone(planned: Job, tmp_path: Path) -> None:
    forecast = forecast_run(planned(plan_output_tokens=8), NoEngineBackend())
    storage = Storage(str(tmp_path / "out"))
    write_forecast(storage, forecast)
    assert read_forecast(storage, forecast.run) == forecast
    assert read_forecast(storage, "another") is None

    totals = Totals(rows=ROWS, generated_tokens=16 * ROWS)
    lines = {line.name: line for line in against_actual(forecast, totals)}
    assert (lines["output tokens"].planned, lines["output tokens"].actual) == ("480", "960")
    assert lines["output tokens"].ratio == "2.000"
    assert "replica-seconds" not in lines
    timed = replace(forecast, seconds=2.0)
    assert against_actual(timed, replace(totals, seconds=3.0))[-1] == ("replica-seconds", "2.000", "3.000", "1.500")
    audited = against_actual(timed, replace(totals, seconds=6.0, audited=ROWS))[-1]
    assert audited.name == "replica-seconds, with audits in the actual"
    assert against_actual(None, totals) == []


def test_rows_without_a_prompt_cost_nothing(planned: Job, write_parquet: Callable[..., Path], tmp_path: Path) -> None:
    without = forecast_run(planned(), NoEngineBackend())
    write_parquet(tmp_path / "in/2.parquet", {"text": pa.array([None] * 20, pa.string())})
    forecast = forecast_run(planned(), NoEngineBackend())
    assert forecast.rows == ROWS + 20
    assert forecast.error_share == pytest.approx(0.25)
    assert forecast.flops == without.flops
    write_parquet(tmp_path / "bad/0.parquet", {"text": pa.array([None] * 2, pa.string())})
    said = "no prompt can be made of any of 2 sampled rows of '.*bad'; the first one's error: text is null"
    with pytest.raises(JobError, match=said):
        forecast_run(planned(input=str(tmp_path / "bad")), NoEngineBackend())


def test_an_input_without_rows_is_nothing_to_do(write_parquet: Callable[..., Path], tmp_path: Path, job: Job) -> None:
    """The job itself succeeds."""
    write_parquet(tmp_path / "in/a.parquet", {"text": pa.array([], pa.string())})
    with pytest.raises(NothingToDo, match=r"no rows are found in '.*in'"):
        forecast_run(job(), NoEngineBackend())


def test_the_bill_is_hours_times_price_and_names_full_depth() -> None:
    totals = Totals(
        rows=10, seconds=7200, flops_prompt=50, flops_decode=50, flops_decode_full_depth=100, flops_full_depth=150
    )
    lines = bill(3.0, replace(totals, gpu_seconds=14400, gpuless_seconds=0))
    assert lines["GPU-hours"] == "4.0000"
    assert lines["cost"].startswith("12.0000 at 3 an hour, 1,200,000.00 per million rows")
    assert lines["cost at full depth"].startswith("18.0000")
    assert bill(None, totals) == {"replica-hours": "2.0000"}


def test_the_bill_has_the_energy_that_was_counted() -> None:
    totals = Totals(rows=10, joules=7.2e6, flops_prompt=50, flops_decode=50, flops_full_depth=150)
    lines = bill(None, totals)
    assert lines["energy"] == "2.0000 kWh of the GPUs, 200,000.00 per million rows"
    assert lines["energy at full depth"].startswith("3.0000 kWh")


def test_what_audits_took_is_billed_and_full_depth_has_none() -> None:
    totals = Totals(rows=10, seconds=7200, flops_prompt=50, flops_decode=50, flops_full_depth=150, flops_audit=100)
    lines = bill(3.0, totals)
    assert lines["cost"].startswith("6.0000 at 3 an hour")
    assert lines["cost at full depth"].startswith("4.5000,")
