"""A damaged record of any kind is read right or ends in one sentence, and leads to nothing outside of its output."""

from pathlib import Path

import pytest
from trials import all_results, check, say_by

SCRIPT = Path(__file__).with_name("records.py")
KINDS = 29


def test_damaged_records_end_in_one_sentence_or_are_read() -> None:
    found = all_results(SCRIPT, 4 * KINDS, at_a_time=2 * KINDS)
    assert check(found, 4 * KINDS, "records") > KINDS
    assert len({result["kind"].split(", ")[0] for result in found}) == KINDS


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_damaged_records_end_in_one_sentence_each_or_are_read() -> None:
    found = all_results(SCRIPT, 10_000)
    say_by(found)
    assert check(found, 10_000, "records") > 4000
