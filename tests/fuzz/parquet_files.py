"""Damaged Parquet files as input of whole jobs; run as a script, in a process of its own, for some may crash Arrow.

usage: parquet_files.py FIRST END      prints one line of JSON for each seed from FIRST up to END
"""

import io
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import Echo, EchoBackend
from inline_session import without_ray
from trials import run, sentence

from pipeline.config import JobConfig
from pipeline.errors import JobError, JobStopped, UnitsFailed
from pipeline.inspection import inspect, verify
from pipeline.run import run_job
from pipeline.storage.storage import Storage

KINDS = ("truncate", "footer bits", "page bits", "footer bytes", "huge", "insert", "cut", "footer length", "swap")
WHOLE_FILES = 60
GOOD_ROWS = 3


def table(rows: int) -> pa.Table:
    return pa.table(
        {
            "text": [f"word {row} " * (row % 9 + 1) for row in range(rows)],
            "n": list(range(rows)),
            "l": [[row, row + 1] for row in range(rows)],
            "s": [{"a": row, "b": str(row)} for row in range(rows)],
            "f": [row / 3 for row in range(rows)],
            "d": pa.array([("x", "y")[row % 2] for row in range(rows)]).dictionary_encode(),
            "b": [bytes([row % 256]) * 5 for row in range(rows)],
        }
    )


def whole(seed: int) -> bytes:
    """A file as one of many writers would make it."""
    draw = random.Random(seed)
    rows = draw.choice([1, 50, 400])
    sink = io.BytesIO()
    pq.write_table(
        table(rows), sink,
        row_group_size=max(1, rows // draw.choice([1, 3])),
        compression=draw.choice(["zstd", "snappy", "none", "gzip", "lz4", "brotli"]),
        use_dictionary=draw.random() < 0.5,
        data_page_version=draw.choice(["1.0", "2.0"]),
        write_page_checksum=draw.random() < 0.3,
        store_schema=draw.random() < 0.7,
    )  # fmt: skip
    return sink.getvalue()


def damaged(seed: int) -> tuple[str, bytes]:
    """What was done to a file, and the file."""
    draw = random.Random(seed)
    content = bytearray(whole(draw.randrange(WHOLE_FILES)))
    length = int.from_bytes(content[-8:-4], "little")
    footer, end = len(content) - 8 - length, len(content) - 8
    kind = draw.choice(KINDS)
    if kind == "truncate":
        del content[draw.randrange(len(content)) :]
    elif kind in ("footer bits", "page bits"):
        for _ in range(draw.randint(1, 8)):
            place = draw.randrange(footer, end) if kind == "footer bits" else draw.randrange(4, footer)
            content[place] ^= 1 << draw.randrange(8)
    elif kind == "footer bytes":
        place = draw.randrange(footer, end)
        content[place : place + draw.randint(1, 16)] = draw.randbytes(draw.randint(1, 16))
    elif kind == "huge":  # numbers of some thirty bits in a footer, or in the first page's header
        place = draw.choice([draw.randrange(footer, end - 6), draw.randrange(4, min(footer, 60))])
        content[place : place + 5] = b"\xff\xff\xff\xff" + bytes([draw.choice([1, 7, 15])])
    elif kind == "insert":
        place = draw.randrange(len(content))
        content[place:place] = draw.randbytes(draw.randint(1, 64))
    elif kind == "cut":
        place = draw.randrange(len(content))
        del content[place : place + draw.randint(1, 64)]
    elif kind == "footer length":
        wrong = draw.choice([0, 1, 2**31 - 1, 2**32 - 1, length + 1, length - 1, len(content)])
        content[-8:-4] = wrong.to_bytes(4, "little")
    else:
        one, other = draw.randrange(len(content) - 8), draw.randrange(len(content) - 8)
        content[one : one + 8], content[other : other + 8] = content[other : other + 8], content[one : one + 8]
    return kind, bytes(content)


def process(content: bytes, folder: Path) -> str:
    """How a job ends that has this file beside a good one; "" where nothing was to be found fault with.

    Raises whatever a job must not: anything but a sentence, and AssertionError where the good file did not get through.
    """
    (folder / "in").mkdir()
    pq.write_table(table(GOOD_ROWS), folder / "in/good.parquet")
    (folder / "in/x.parquet").write_bytes(content)
    config = JobConfig(input=str(folder / "in"), output=str(folder / "out"), max_new_tokens=5, rows_per_unit=64)
    said = ""
    try:
        run_job(config, EchoBackend(Echo("said: ")))
    except JobStopped:
        raise
    except UnitsFailed as error:
        said = str(error)
    except JobError as error:  # before anything is generated: what all files have to agree on
        if Storage(config.output).names("data"):
            raise AssertionError("stopped half way") from error
        return sentence(str(error))
    found = inspect(Storage(config.output))
    assert verify(Storage(config.output), found) == []
    good = [commit for commit in found.commits if commit.path.endswith("good.parquet")]
    assert sum(commit.totals.rows for commit in good) == GOOD_ROWS
    return sentence(said)


def trial(seed: int) -> tuple[str, Callable[[], str]]:
    kind, content = damaged(seed)

    def process_it() -> str:
        with tempfile.TemporaryDirectory() as folder:
            return process(content, Path(folder))

    return kind, process_it


if __name__ == "__main__":
    without_ray(pytest.MonkeyPatch())
    run(trial)
