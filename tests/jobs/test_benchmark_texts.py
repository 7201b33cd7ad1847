"""What a benchmark reads: each row counts, so a bad one is named."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import Tokenizer
from jobs.benchmarks.texts import encoded, read_columns
from pipeline.errors import JobError
from pipeline.rows.template import PromptTemplate


def test_files_that_cannot_be_read_together_are_named(tmp_path: Path) -> None:
    good, other, junk = (tmp_path / f"{name}.parquet" for name in ("good", "other", "junk"))
    pq.write_table(pa.table({"text": ["a"]}), good)
    pq.write_table(pa.table({"text": [1]}), other)
    junk.write_bytes(b"PAR1 and no more")
    assert read_columns([good, good], ["text"])["text"].to_pylist() == ["a", "a"]
    for files, column, said in (
        ([good], "title", r"good.parquet' has no column 'title': name another"),
        ([junk], "text", r"junk.parquet' cannot be read \(.*\): name a Parquet file"),
        ([tmp_path / "nowhere"], "text", r"nowhere' cannot be read \(.*\): name a Parquet file"),
        ([good, other], "text", r"files do not fit together \(.*\): name one of them"),
    ):
        with pytest.raises(JobError, match=said):
            read_columns(files, [column])


def test_texts_that_make_no_prompt_are_named(make_checkpoint: Callable[..., Path]) -> None:
    tokenizer, template = Tokenizer(make_checkpoint()), PromptTemplate("{text}!", format="raw")
    assert len(encoded(["a", "bc"], template, tokenizer, 9)) == 2
    for text, said in ((None, "text is null"), (7, "text is int"), ("", "text is empty")):
        with pytest.raises(JobError, match=f"row 1 of the input makes no prompt .{said}.*: leave it out"):
            encoded(["a", text], template, tokenizer, 9)
    with pytest.raises(JobError, match=r"names column 'title': a benchmark's prompts are made of \{text\} alone"):
        encoded(["a"], PromptTemplate("{title}: {text}", format="raw"), tokenizer, 9)
