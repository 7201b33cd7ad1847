"""Filters: what each drops, in which order rows are counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.dataset.config import DatasetConfig, FilterConfig
from pipeline.dataset.filters import Filters
from pipeline.errors import JobError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def filters(**options: Any) -> Filters:
    return Filters(DatasetConfig(input="in", output="out", **options))


def row(text: str | None, finish: str = "stop", error: str | None = None) -> dict[str, str | None]:
    return {"generation": text, "finish_reason": finish, "error": error}


def reasons(sieve: Filters, *texts: str) -> list[str | None]:
    return [sieve.reason_to_drop(row(text)) for text in texts]


def test_rows_with_errors_never_pass() -> None:
    sieve = filters(duplicates="keep", min_chars=0)
    assert sieve.reason_to_drop(row(None, "error", "text is null")) == "error"


def test_finish_reasons_not_asked_for_are_dropped() -> None:
    sieve = filters(finish_reasons=["stop"])
    assert sieve.reason_to_drop(row("cut", "length")) == "finish_reason"
    assert sieve.reason_to_drop(row("whole", "stop")) is None


def test_lengths_are_in_characters_and_white_space_is_no_text() -> None:
    sieve = filters(min_chars=3, max_chars=5)
    assert reasons(sieve, "abc", "abcde", "ab", "abcdef", "a    ") == [None, None, "length", "length", "length"]


def test_patterns_are_searched_for_anywhere() -> None:
    sieve = filters(require_pattern=r"\d+", forbid_pattern="(?i)as an ai")
    assert reasons(sieve, "it is 42", "no number", "As an AI I say 7") == [None, "pattern", "pattern"]


def test_only_json_that_is_valid_under_the_schema_passes(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    sieve = filters(json_schema=str(path))
    assert reasons(sieve, '{"name": "Ada", "age": 36}', '{"age": 36}', '{"name": "Ada", "age": -1}', "Ada") == [
        None, "json_schema", "json_schema", "json_schema",
    ]  # fmt: skip


def test_a_text_that_goes_round_is_dropped_by_the_share_of_its_words_that_it_had_said() -> None:
    said, again = "one two three four five six seven", "one two three four"  # 9 runs of three words, 2 of them again
    assert reasons(filters(max_repetition=0.23), said, f"{said} {again}") == [None, None]
    assert reasons(filters(max_repetition=0.22), said, f"{said} {again}") == [None, "repetition"]
    assert reasons(filters(max_repetition=0), "too short", "go go go", "go go go go") == [
        None, None, "repetition",
    ]  # fmt: skip


def test_every_filter_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "datasets.md").read_text(encoding="utf-8")
    flags = [f"--{name.replace('_', '-')}" for name in FilterConfig.model_fields]
    assert [flag for flag in flags if f"`{flag}`" not in page] == []


def test_a_filter_that_changes_makes_the_data_set_anew() -> None:
    changed: dict[str, Any] = {
        "finish_reasons": ["stop"], "min_chars": 2, "max_chars": 9, "require_pattern": "a", "forbid_pattern": "b",
        "max_repetition": 0.5, "duplicates": "exact",
    }  # fmt: skip
    assert set(filters().described) == {*changed, "json_schema"} == set(FilterConfig.model_fields)
    for name, value in changed.items():
        assert filters(**{name: value}).described != filters().described


@pytest.mark.parametrize("content", ["{", '{"type": "thing"}'])
def test_a_schema_that_cannot_be_used_is_named_before_anything_runs(tmp_path: Path, content: str) -> None:
    path = tmp_path / "schema.json"
    path.write_text(content)
    with pytest.raises(JobError, match=r"schema\.json"):
        filters(json_schema=str(path))


@pytest.mark.parametrize(
    ("duplicates", "expected"),
    [
        ("keep", [None, None, None]),
        ("exact", [None, None, "duplicate"]),
        ("normalized", [None, "duplicate", "duplicate"]),
    ],
)
def test_repeated_generations_are_dropped_as_asked(duplicates: str, expected: list[str | None]) -> None:
    assert reasons(filters(duplicates=duplicates), "The same.", "the  SAME.\n", "The same.") == expected


def test_equal_answers_to_two_requests_are_both_kept() -> None:
    sieve = filters(input_format="openai-batch", output_format="openai-batch")
    assert reasons(sieve, "Yes.", "Yes.") == [None, None]
    assert sieve.described["duplicates"] == "keep"


def test_a_row_counts_under_the_first_filter_it_fails_and_what_was_dropped_is_no_original() -> None:
    sieve = filters(min_chars=4, require_pattern="x")
    assert reasons(sieve, "no", "long enough", "xxxx", "xxxx") == ["length", "pattern", None, "duplicate"]
    assert (sieve.kept, dict(sieve.dropped)) == (1, {"length": 1, "pattern": 1, "duplicate": 1})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"require_pattern": "("}, r"require_pattern\n.* is no regular expression that can be used"),
        ({"samples_per_prompt": 2}, "samples_per_prompt above 1 needs a temperature above 0"),
        ({"output_format": "openai-batch"}, "output_format openai-batch .* needs input_format openai-batch"),
        ({"min_chars": 9, "max_chars": 3}, "min_chars 9 exceeds max_chars 3"),
        ({"finish_reasons": []}, r"finish_reasons\n.* at least 1 item"),
        ({"max_repetition": 1.5}, r"max_repetition\n.* less than or equal to 1"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DatasetConfig(input="in", output="out", **options)
