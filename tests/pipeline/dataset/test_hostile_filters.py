"""No schema and no generation can stop the filters of a run that is paid for, nor keep them busy for long."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.json_text import DEEPEST
from pipeline.dataset.config import DatasetConfig
from pipeline.dataset.filters import Filters
from pipeline.dataset.json_filter import JsonFilter
from pipeline.errors import JobError


def _filters(folder: Path, schema: Any = None, **options: Any) -> Filters:
    if schema is not None:
        file = folder / "schema.json"
        file.write_text(schema if isinstance(schema, str) else json.dumps(schema))
        options["json_schema"] = str(file)
    return Filters(DatasetConfig(input="in", output="out", **options))


def _reason(filters: Filters, text: str) -> str | None:
    return filters.reason_to_drop({"error": None, "generation": text, "finish_reason": "stop"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [("0.07", None), ("19.99", None), ("0.005", "json_schema"), ("1e999", "json_schema"), ("-1e999", "json_schema"),
     ("NaN", "json_schema"), ("Infinity", "json_schema"), ("9" * 400, None), ("1e308", None),
     ("[" * 100_000, "json_schema"), ("9" * 5_000, "json_schema")],
)  # fmt: skip
def test_any_number_is_a_multiple_of_a_hundredth_or_is_not(tmp_path: Path, text: str, reason: str | None) -> None:
    assert _reason(_filters(tmp_path, {"multipleOf": 0.01}), text) == reason


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#/$defs/missing"}, r"'/\$defs/missing' does not exist\): put what it refers to in its \$defs"),
        ({"properties": {"a": {"items": {"$ref": "other.json"}}}}, r"'other\.json' .* put what it refers to in"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "nothing is fetched.* put what it refers to in"),
        ({"$ref": "#/x", "x": {"$ref": "#/y"}}, "'/y' does not exist"),
        ({"$schema": "http://127.0.0.1:9/dialect"}, "'http://127.0.0.1:9/dialect'"),
        ({"$ref": "#"}, "refers to itself without end"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}}, "itself without end"),
        ({"pattern": "(?=a)b"}, "in linear time, which has no look-around"),
        ({"patternProperties": {"(a)\\1": {}}}, "in linear time, which has no look-around"),
        ({"type": "nothing"}, "is no JSON Schema"),
        ('{"maximum": NaN}', "NaN is no JSON"),
        ("[" * 10_000, "is no JSON Schema"),
        ("7", "json_schema"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_before_anything_is_generated(
    tmp_path: Path, schema: Any, why: str
) -> None:
    with pytest.raises(JobError, match=why):
        _filters(tmp_path, schema)


def test_a_schema_that_is_not_on_this_machine_is_told_so() -> None:
    for schema in ("s3://bucket/schema.json", '{"type": "object"}', f'{{"title": "{"x" * 300}"}}'):
        with pytest.raises(JobError, match=r"cannot be read \(.*\): name a file on this machine that holds the schema"):
            JsonFilter(schema)


def test_references_inside_the_file_are_followed(tmp_path: Path) -> None:
    tree = {"$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}},
                               "additionalProperties": False}}, "$ref": "#/$defs/tree"}  # fmt: skip
    filters = _filters(tmp_path, tree)
    assert _reason(filters, '{"left": {"left": {}}}') is None
    assert _reason(filters, '{"left": {"left": 7}}') == "json_schema"
    assert _reason(filters, '{"right": {}}') == "json_schema"
    deepest, deeper = ('{"left":' * (depth - 1) + "{}" + "}" * (depth - 1) for depth in (DEEPEST, DEEPEST + 1))
    assert (_reason(filters, deepest), _reason(filters, deeper)) == (None, "json_schema")


def test_a_schema_may_refer_to_itself_and_to_its_dialect_where_that_ends(tmp_path: Path) -> None:
    nested = {"type": ["object", "null"], "additionalProperties": {"$ref": "#"}, "allOf": [{"$ref": "#/$defs/a"}],
              "$defs": {"a": {}, "b": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}}  # fmt: skip
    filters = _filters(tmp_path, nested | {"anyOf": [{"$ref": "#/$defs/b"}, {}]})
    assert [_reason(filters, text) for text in ('{"a": {"b": null}}', '{"a": {"b": 7}}')] == [None, "json_schema"]


def test_half_a_character_is_one_character(tmp_path: Path) -> None:
    filters = _filters(tmp_path, {"pattern": "^a.$"})
    assert [_reason(filters, f'"{text}"') for text in (r"a\ud83d\ude00", r"a\ud83d", r"\ud83d")] == [
        None, None, "json_schema",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a", "http://127.0.0.1:9/a.json", "http://127.0.0.1:9/a.json#"])
def test_a_schema_may_have_a_name(tmp_path: Path, name: str) -> None:
    filters = _filters(tmp_path, DRAFT_7 | {"$id": name, "allOf": [{"$ref": "#/parts/it"}], "parts": {"it": WORDS}})
    assert [_reason(filters, text) for text in ('"word"', '"7"')] == [None, "json_schema"]


DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
WORDS = {"type": "string", "pattern": "^[a-z]+$"}


@pytest.mark.parametrize(
    ("behind", "good", "bad"),
    [
        ({"dependencies": {"a": {"properties": {"b": WORDS}}}}, '{"a": 1, "b": "word"}', '{"a": 1, "b": "7"}'),
        ({"items": [WORDS, {"type": "integer"}]}, '["word", 7]', '["7", 7]'),
    ],
)
def test_what_a_reference_leads_to_is_of_the_schemas_own_dialect(
    tmp_path: Path, behind: dict[str, Any], good: str, bad: str
) -> None:
    # At a place that no dialect has a name for, so that only the reference leads there.
    filters = _filters(tmp_path, DRAFT_7 | {"allOf": [{"$ref": "#/parts/it"}], "parts": {"it": behind}})
    assert (_reason(filters, good), _reason(filters, bad)) == (None, "json_schema")


@pytest.mark.parametrize("where", ["require_pattern", "pattern", "patternProperties"])
def test_no_pattern_takes_longer_than_its_text(tmp_path: Path, where: str) -> None:
    slow, text = r"^(\w+\s?)+$", "aaaaaaaaaaaaaaaaaaaaaaaaaaaa!"
    if where == "require_pattern":
        filters, reason = _filters(tmp_path, require_pattern=slow), "pattern"
    elif where == "pattern":
        filters, text, reason = _filters(tmp_path, {"pattern": slow}), json.dumps(text), "json_schema"
    else:
        schema = {"patternProperties": {slow: {}}, "additionalProperties": False}
        filters, text, reason = _filters(tmp_path, schema), json.dumps({text: 1}), "json_schema"
    started = time.monotonic()
    assert _reason(filters, text) == reason
    assert time.monotonic() - started < 5  # 23 s by backtracking


def test_a_pattern_that_is_not_in_linear_time_is_refused_by_name() -> None:
    for pattern in (r"(?=a)b", r"(a)\1", "("):
        with pytest.raises(ValidationError, match="patterns are RE2's, without look-around and back-references"):
            DatasetConfig(input="in", output="out", forbid_pattern=pattern)
