"""A study keeps what it has computed, and its figures are those of the outputs."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest

from engine import EarlyExit, Engine, Sampling, Schedule
from engine.bootstrap import Bootstrap, Estimate
from engine.schedules import decays, orders, recipes
from pipeline.errors import JobError
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.figures import Outputs, combined, figures, read_outputs, worst
from pipeline.evaluation.report import headline
from pipeline.evaluation.study import Prompt, Study, in_order

SAMPLING = Sampling(max_new_tokens=10)


class NoEngine:
    """What must not be asked for anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"engine.{name} was used though everything is computed")


def contenders() -> list[Contender]:
    shallow = Schedule.build(30, orders.lowest_first(30, 4), decays.constant(4), horizon=0)
    return [
        Contender.full_depth(30),
        Contender("four skipped", 1.1, shallow),
        Contender("half", 1.6, recipes.early_termination(30, 15), is_rival=True, note="for contrast"),
        Contender("CALM-DEC", None, EarlyExit("CALM-DEC", (20,), 0.5), is_rival=True),
    ]


@pytest.fixture(scope="module")
def prompts(packaged: Engine, texts: list[str]) -> list[Prompt]:
    shortest = sorted(texts, key=len)[:5]
    encode = packaged.tokenizer.encode_chat
    return [Prompt(f"row {i}", text, text.split(".")[0], tuple(encode(text)), text) for i, text in enumerate(shortest)]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, packaged: Engine, prompts: list[Prompt]) -> Study:
    made = Study(tmp_path_factory.mktemp("study"), "packaged", SAMPLING, 3, prompts)
    made.run(packaged, contenders())
    return made


def test_outputs_are_those_of_the_engine(study: Study, packaged: Engine, prompts: list[Prompt]) -> None:
    tokens = [prompt.tokens for prompt in prompts]
    for contender in contenders():
        rows = study.outputs(contender).to_pylist()
        assert [row["id"] for row in rows] == [prompt.id for prompt in prompts]
        if isinstance(contender.method, Schedule):
            alone = in_order(list(packaged.generate(tokens, SAMPLING, contender.method, batch_size=3)))
        else:
            alone = in_order(list(packaged.generate_with_exits(tokens, SAMPLING, contender.method, batch_size=3)))
        for row, generation in zip(rows, alone, strict=True):
            assert row["tokens"] == list(generation.tokens)
            assert row["generation"] == generation.text
            assert row["flops_decode"] == generation.flops_decode


def test_nothing_is_computed_twice(study: Study) -> None:
    study.run(cast(Engine, NoEngine()), contenders())


def test_what_is_called_otherwise_is_not_computed_again(study: Study) -> None:
    """As a schedule is once another one of its name stands beside it."""
    renamed = [replace(each, name=f"{each.name} (out/a)") for each in contenders()]
    study.run(cast(Engine, NoEngine()), renamed)
    assert study.outputs(renamed[1]).equals(study.outputs(contenders()[1]))


def test_an_interrupted_study_goes_on_where_it_was(
    tmp_path: Path, study: Study, packaged: Engine, prompts: list[Prompt]
) -> None:
    """The second half of the prompts and a new contender are all that is left to do."""
    part = Study(tmp_path, "packaged", SAMPLING, 3, prompts[:3])
    part.run(packaged, contenders()[:2])
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.parquet")}
    assert len(files) == 2
    whole = Study(tmp_path, "packaged", SAMPLING, 3, prompts)
    whole.run(packaged, contenders()[:3])
    assert len(list(tmp_path.rglob("*.parquet"))) == 6
    assert {file: file.stat().st_mtime_ns for file in files} == files
    for contender in contenders()[:3]:
        columns = ["tokens", "flops_decode", "agrees", "nll"]
        again, once = (each.outputs(contender).select(columns).to_pylist() for each in (whole, study))
        assert again == once


def test_damaged_outputs_are_said_to_be(tmp_path: Path, packaged: Engine, prompts: list[Prompt]) -> None:
    study = Study(tmp_path, "packaged", SAMPLING, 3, prompts[:1])
    study.run(packaged, contenders()[:1])
    [file] = tmp_path.rglob("*.parquet")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(JobError, match=r"parquet' are damaged .*delete it, and they are made anew"):
        study.outputs(contenders()[0])


def test_outputs_that_are_of_other_rows_than_their_name_says_are_damaged(tmp_path: Path, study: Study) -> None:
    copy = replace(study, directory=Path(shutil.copytree(study.directory, tmp_path / "study")))
    full = contenders()[0]
    file = copy._file(full, study.prompts[:3])
    whole = pq.read_table(file)
    for other in (whole.take([1, 0, 2]), whole.slice(0, 2), whole.drop_columns(["nll"])):
        pq.write_table(other, file)
        with pytest.raises(JobError, match=r"parquet' are damaged \(it holds other rows\): delete it, and"):
            copy.outputs(full)


def test_another_model_sampling_or_prompt_is_another_output(study: Study, packaged: Engine) -> None:
    full = contenders()[:1]
    for other in (
        Study(study.directory, "another", SAMPLING, 3, study.prompts),
        Study(study.directory, "packaged", Sampling(max_new_tokens=11), 3, study.prompts),
        Study(study.directory, "packaged", SAMPLING, 3, study.prompts[1:]),
    ):
        with pytest.raises(AssertionError, match="was used"):
            other.run(cast(Engine, NoEngine()), full)


def test_figures_of_full_depth_are_perfect_and_the_rest_follow_the_ledger(study: Study) -> None:
    outputs = read_outputs(study, contenders())
    bootstrap = Bootstrap(len(study.prompts))
    full, four, half, calm = (figures(each, bootstrap) for each in outputs)
    assert full.decode_flop_speedup == full.sample_flop_speedup == full.agreement == (1, 1, 1)
    assert full.share_of_full_depth["rouge_l"] == (1, 1, 1)
    assert full.exact_match == full.length_ratio == (1, 1, 1)
    assert full.excess_nll == (0, 0, 0)
    assert full.measured_speedup == 1
    assert full.kl is not None
    assert full.kl.value < 1e-4
    assert four.agreement is not None
    assert half.agreement is not None
    assert 1 > four.agreement.value > half.agreement.value
    assert four.excess_nll is not None
    assert half.excess_nll is not None
    assert 0 < four.excess_nll.value < half.excess_nll.value
    assert four.decode_flop_speedup is not None
    assert four.sample_flop_speedup is not None
    rows = study.outputs(contenders()[1]).to_pylist()
    spent = sum(row["flops_decode"] for row in rows)
    whole = sum(row["flops_decode_full_depth"] for row in rows)
    assert four.decode_flop_speedup.value == pytest.approx(whole / spent)
    assert 1 < four.sample_flop_speedup.value < four.decode_flop_speedup.value
    ours, theirs = (study.outputs(contender).to_pylist() for contender in (contenders()[1], contenders()[0]))
    mean = [sum(row["nll"] for row in rows) / sum(row["generated_tokens"] for row in rows) for rows in (ours, theirs)]
    assert four.excess_nll.value == pytest.approx(mean[0] - mean[1])
    assert calm.agreement is None
    assert calm.excess_nll is not None  # its answers are as good as any to judge
    assert calm.measured_speedup is None
    assert [step for step, _, _ in four.agreement_by_step] == list(range(9))


def test_times_of_different_sessions_are_not_compared(tmp_path: Path, packaged: Engine, prompts: list[Prompt]) -> None:
    later = Study(tmp_path, "packaged", SAMPLING, 3, prompts[:2])
    later.run(packaged, contenders()[:1])
    later.run(packaged, contenders()[:2])
    outputs = read_outputs(later, contenders()[:2])
    assert figures(outputs[1], Bootstrap(2)).measured_speedup is None


def test_the_worst_sample_comes_first_and_the_table_holds_all(study: Study) -> None:
    outputs = read_outputs(study, contenders())
    rows = worst(outputs[2], count=3)
    losses = [row["contender"]["nll"] - row["full_depth"]["nll"] for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 0
    assert len(rows) == 3
    for row, prompt in ((row, prompt) for row in rows for prompt in study.prompts if prompt.id == row["id"]):
        assert row["text"] == prompt.text
    table = combined(outputs)
    assert table.num_rows == 4 * len(study.prompts)
    assert table["rouge_l_to_full_depth"].to_pylist()[: len(study.prompts)] == [1.0] * len(study.prompts)


def test_the_headline_has_the_whole_sample_first_and_the_best_by_excess_nll(study: Study) -> None:
    outputs = read_outputs(study, contenders())
    found = [figures(each, Bootstrap(len(study.prompts))) for each in outputs]
    again = replace(found[1], label="less likely", excess_nll=Estimate(9.0, 9.0, 9.0))
    [line] = headline([*found, again]).splitlines()
    speedup = found[1].sample_flop_speedup
    assert speedup is not None
    assert line.startswith(f"four skipped, 1.1x: {speedup.value:.2f}x fewer FLOPs for whole samples, ")
    assert re.search(
        r"x in decoding; excess NLL \d\.\d\d nats a token; ROUGE-L \d\.\d\d of full depth's; repetition", line
    )
    whole = [replace(found[1], target=None, label=f"{gain}x of whole samples") for gain in (1.5, 2)]
    whole.append(replace(found[1], prompt_layers=3, label="1.1x in decoding, and fewer layers on prompts"))
    said = headline([*found, *whole]).splitlines()
    assert {each.partition(":")[0] for each in said} == {line.partition(":")[0], *(each.label for each in whole)}


def test_a_row_without_a_reference_gives_no_figure_to_compare_with() -> None:
    """Not even where full depth says nothing, and would be like it."""
    prompts = [Prompt(str(row), "A text.", reference, (1,), "A text.") for row, reference in enumerate(("", "A text."))]
    silent = [{"generation": ""}, {"generation": "A text."}]
    found = Outputs(contenders()[0], prompts, silent, [])
    assert [each and each.rouge_l for each in found.against_reference] == [None, 1]


def test_figures_against_references_are_of_the_rows_that_have_one(study: Study) -> None:
    first, *others = study.prompts
    [outputs] = read_outputs(study, contenders()[:1])
    some = replace(outputs, prompts=[replace(first, reference=" "), *others])
    mean = figures(some, Bootstrap(len(study.prompts))).against_reference["chrf"]
    assert mean is not None
    assert mean.value == pytest.approx(sum(each.chrf for each in outputs.against_reference[1:] if each) / len(others))
    assert combined([some])["chrf_to_reference"].null_count == 1
    assert worst(some, count=1)[0]["contender"]["rouge_l"] is None
    none = replace(outputs, prompts=[replace(prompt, reference="") for prompt in study.prompts])
    assert figures(none, Bootstrap(len(study.prompts))).against_reference["chrf"] is None
