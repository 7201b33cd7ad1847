"""The record of an incremental output's input files."""

from hashlib import sha256
from pathlib import Path

from engine import json_text
from pipeline.inputs import known_files
from pipeline.inputs.known_files import INPUTS_FILE, KnownFile, read_known_files, write_known_files
from pipeline.inputs.work import MOST_UNITS
from pipeline.storage.records import LARGE
from pipeline.storage.storage import Storage

TENTH_OF_A_PERCENT = MOST_UNITS // 1000


def known(index: int) -> KnownFile:
    digest = sha256(str(index).encode()).hexdigest()
    return KnownFile(f"{1_700_000_000 + index}-{index}-4096", f"sha256:{digest}", digest[:32], 1000, done=digest[:32])


def test_as_many_files_as_an_output_may_have_can_be_read_back(tmp_path: Path) -> None:
    name = "year=2026/month=11/day=24/part-{:06d}-0123456789abcdef0123456789abcdef.snappy.parquet"
    files = {name.format(index): known(index) for index in range(TENTH_OF_A_PERCENT)}
    write_known_files(Storage(str(tmp_path)), files)
    text = (tmp_path / INPUTS_FILE).read_text()
    assert 1000 * len(text) < 2 * LARGE == known_files._RECORD._limit
    assert 1000 * sum(map(text.count, ",[{")) < json_text.MOST_VALUES
    assert read_known_files(Storage(str(tmp_path))) == files


def test_what_is_out_of_the_ordinary_is_kept(tmp_path: Path) -> None:
    files = {
        "whole": known(1),
        "new": KnownFile("s", None, "v", 0),
        "gone": KnownFile("gone", None, "w", 7, "w", ("x", "y"), partial=True),
    }
    write_known_files(Storage(str(tmp_path)), files)
    assert read_known_files(Storage(str(tmp_path))) == files
