"""Which files an input names: what a shell user would expect; what is left out is said."""

import logging
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import BUCKET, S3Server

from pipeline.errors import JobError
from pipeline.inputs.input_files import find_input_files
from pipeline.storage.storage import Storage

Named = Callable[[str], list[str]]

TRAIN = ["train-00000.parquet", "train.4.parquet", "train.parquet", "train1.parquet", "train_1.parquet"]
FILES = [
    *TRAIN, "test.parquet", "UPPER.PARQUET", "notes.txt", ".hidden.parquet", "_mine.parquet", "_commits/a.parquet",
    ".hidden/a.parquet",
    "2024/a.parquet", "2024/deep/b.parquet", "2025/a.parquet", "run[1]/a.parquet", "run1/a.parquet",
    "table.parquet/part-0.parquet", "table.parquet/_SUCCESS", "bare/part-0", "bare/part-1",
    "x[1].parquet", "x1.parquet",
]  # fmt: skip
UNASKED = {"notes.txt", "bare/part-0", "bare/part-1", "table.parquet/_SUCCESS"}
EVERYTHING = sorted(file for file in set(FILES) - UNASKED if file[0] not in "._")
NAMED = [
    ("", EVERYTHING),
    ("*", EVERYTHING),
    ("train*.parquet", TRAIN),
    ("train?.parquet", ["train1.parquet"]),
    ("train[_.]*.parquet", ["train.4.parquet", "train_1.parquet"]),
    ("t{rain,est}.parquet", ["test.parquet", "train.parquet"]),
    ("{2024,2025}", ["2024/a.parquet", "2024/deep/b.parquet", "2025/a.parquet"]),
    ("202*/a.parquet", ["2024/a.parquet", "2025/a.parquet"]),
    ("202*", ["2024/a.parquet", "2024/deep/b.parquet", "2025/a.parquet"]),
    ("20*/**/b.parquet", ["2024/deep/b.parquet"]),
    ("2024/**", ["2024/a.parquet", "2024/deep/b.parquet"]),
    ("run[1]", ["run[1]/a.parquet"]),
    ("run[1]/a.parquet", ["run[1]/a.parquet"]),
    ("run[1]/*.parquet", ["run[1]/a.parquet"]),
    ("run[12]/a.parquet", ["run1/a.parquet"]),
    ("x[1].parquet", ["x[1].parquet"]),
    ("ta*.parquet", ["table.parquet/part-0.parquet"]),
    ("table.parquet", ["table.parquet/part-0.parquet"]),
    ("_mine.parquet", ["_mine.parquet"]),
    ("_*.parquet", ["_mine.parquet"]),
    ("_commits", ["_commits/a.parquet"]),
    ("notes.txt", ["notes.txt"]),
    ("n*", ["notes.txt"]),
    ("{n,2}*", ["2024/a.parquet", "2024/deep/b.parquet", "2025/a.parquet", "notes.txt"]),
    ("[n2]*", ["2024/a.parquet", "2024/deep/b.parquet", "2025/a.parquet"]),
    ("bare/part-*", ["bare/part-0", "bare/part-1"]),
]


@pytest.fixture(scope="module")
def local_tree(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("tree")
    for file in FILES:
        Storage(str(root)).write(file, b"x")
    return str(root)


@pytest.fixture(scope="module")
def s3_tree(s3: S3Server) -> str:
    root = f"{BUCKET}/{uuid.uuid4().hex}"
    for file in FILES:
        s3.files.pipe_file(f"{root}/{file}", b"x")
    return f"s3://{root}"


@pytest.fixture(params=["local", "s3"])
def named(request: pytest.FixtureRequest) -> Named:
    """Files that a path below a tree names, on a disk and on a real S3 server."""
    tree: str = request.getfixturevalue(f"{request.param}_tree")
    if request.param == "s3":
        request.getfixturevalue("credentials")
    root = Storage(tree).root

    def files(path: str) -> list[str]:
        return [found.removeprefix(f"{root}/") for found in find_input_files(Storage(f"{tree}/{path}"))]

    return files


@pytest.mark.parametrize(("path", "files"), NAMED)
def test_a_path_names_what_a_shell_user_expects(named: Named, path: str, files: list[str]) -> None:
    assert named(path) == files


def test_what_is_left_out_is_said(named: Named, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        named("{*.parquet,*.txt,absent*}")
        assert "patterns that match nothing" in caplog.text
        caplog.clear()
        named("")
    (line,) = caplog.messages
    assert '5 names that begin with "_" or "." (such as ' in line
    assert "3 files that do not end in .parquet" in line
    assert "notes.txt" in line or "part-0" in line


def test_links_are_followed_and_a_file_counts_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in ("elsewhere/a.parquet", "elsewhere/deep/b.parquet", "single.parquet", "in/own.parquet"):
        Storage(str(tmp_path)).write(file, b"x")
    os.symlink(tmp_path / "elsewhere", tmp_path / "in/linked")
    os.symlink(tmp_path / "single.parquet", tmp_path / "in/single.parquet")
    whole = [
        f"{tmp_path}/in/{name}"
        for name in ("linked/a.parquet", "linked/deep/b.parquet", "own.parquet", "single.parquet")
    ]
    for path in ("in", "in/**", "in/*"):
        assert find_input_files(Storage(f"{tmp_path}/{path}")) == whole
    assert find_input_files(Storage(f"{tmp_path}/in/**/b.parquet")) == [whole[1]]
    # The same again by other ways, and round in circles.
    os.symlink(tmp_path / "in", tmp_path / "elsewhere/deep/round")
    os.symlink(tmp_path, tmp_path / "in/up")
    os.symlink(tmp_path / "elsewhere/deep", tmp_path / "in/again")
    os.symlink(tmp_path / "in/own.parquet", tmp_path / "in/0.parquet")
    with caplog.at_level(logging.INFO):
        found = find_input_files(Storage(f"{tmp_path}/in"))
    assert {os.path.realpath(path) for path in found} == {os.path.realpath(path) for path in whole}
    assert len(found) == len(whole)
    assert f"{tmp_path}/in/own.parquet" in found
    assert "names that links reach again" in caplog.text


def test_an_input_that_holds_nothing_is_named(named: Named) -> None:
    said = r"(does not exist|holds no Parquet files): name a \.parquet file, its directory or a glob"
    for path in ("absent", "absent*", "absent/*.parquet", "{absent,none}"):
        with pytest.raises(JobError, match=said):
            named(path)


def test_a_name_that_a_disk_has_not_is_told_from_a_place_without_files(tmp_path: Path) -> None:
    absent, empty = "does not exist", "holds no Parquet files"
    for path, why in (("absent.parquet", absent), ("absent", absent), ("", empty), ("absent*", empty)):
        with pytest.raises(JobError, match=re.escape(f"input '{tmp_path}/{path}' {why}")):
            find_input_files(Storage(f"{tmp_path}/{path}"))


def test_names_below_a_glob_keep_their_whole_file_name() -> None:
    assert Storage("/in/train*.parquet").relative("/in/train_1.parquet") == "train_1.parquet"
    assert Storage("/in/202*/a*").relative("/in/2024/a.parquet") == "2024/a.parquet"
    assert Storage("/in/run[1]").relative("/in/run[1]/a.parquet") == "a.parquet"
    assert Storage("/in/{a,b}").relative("/in/a/x.parquet") == "a/x.parquet"
    assert Storage("/in/a.parquet").relative("/in/a.parquet") == "a.parquet"
