"""A damaged Parquet file is read right or fails by itself in one sentence, whatever is wrong with it."""

from pathlib import Path

import pytest
from trials import all_results, check

SCRIPT = Path(__file__).with_name("parquet_files.py")


def test_a_damaged_file_ends_in_one_sentence_and_the_others_are_done() -> None:
    assert check(all_results(SCRIPT, 40), 40, "Parquet files") > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_damaged_files_end_in_one_sentence_each() -> None:
    assert check(all_results(SCRIPT, 2000), 2000, "Parquet files") > 1000
