"""JSON that is safe to read."""

import pytest

from engine import parse_json


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "[1e999]", '{"a": -1e999}', "9" * 5000, "[" * 80 + "]" * 80, "\ufeff1"]
)
def test_json_is_what_every_program_reads_alike(text: str) -> None:
    for given in (text, text.encode()):
        with pytest.raises(ValueError, match=r"."):
            parse_json(given)
    assert parse_json('{"a": [1.5, null, "\\ud83d\\ude00"]}') == {"a": [1.5, None, "😀"]}
