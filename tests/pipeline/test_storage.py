"""The directory a job reads and writes: whole objects, and put-if-absent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from pipeline.errors import JobError
from pipeline.storage import Storage, absolute


def test_of_many_writers_of_one_name_exactly_one_wins_and_its_content_is_whole(tmp_path: Path) -> None:
    writers = 16
    contents = [bytes([writer]) * 200_000 for writer in range(writers)]
    together = Barrier(writers)

    def write(content: bytes) -> bool:
        storage = Storage(str(tmp_path))
        together.wait()
        return storage.write_if_absent("_commits/unit.json", content)

    with ThreadPoolExecutor(writers) as pool:
        won = list(pool.map(write, contents))
    assert sum(won) == 1
    assert Storage(str(tmp_path)).read("_commits/unit.json") == contents[won.index(True)]


def test_a_lost_write_leaves_nothing_behind(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    assert storage.write_if_absent("a/first", b"1")
    assert not storage.write_if_absent("a/first", b"2")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["first"]


def test_a_write_replaces_and_is_read_back(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.write("a/b/c", b"old")
    storage.write("a/b/c", b"new")
    assert storage.read("a/b/c") == b"new"
    with storage.open("a/b/c") as stream:
        assert stream.read() == b"new"


def test_an_object_that_is_missing_reads_as_none(tmp_path: Path) -> None:
    assert Storage(str(tmp_path)).read("no/such") is None


def test_names_are_sorted_carry_their_folder_and_an_absent_folder_has_none(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    for name in ("b.json", "a.json", "c.txt"):
        storage.write(f"folder/{name}", b"")
    assert storage.names("folder", ".json") == ["folder/a.json", "folder/b.json"]
    assert storage.names("elsewhere") == []


def test_what_is_removed_is_gone_and_the_rest_stays(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    for name in ("a", "b", "c"):
        storage.write(f"data/{name}", b"")
    storage.remove(["data/a", "data/c"])
    storage.remove([])
    assert storage.names("data") == ["data/b"]


def test_an_absolute_url_means_the_same_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Storage("here").write("name", b"content")
    url = absolute("here")
    monkeypatch.chdir("/")
    assert Storage(url).read("name") == b"content"
    assert absolute(url) == url


@pytest.mark.parametrize("url", ["s3://bucket/folder", "memory://folder"])
def test_a_url_with_a_scheme_is_absolute_already(url: str) -> None:
    assert absolute(url).replace("memory:///", "memory://") == url


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(JobError, match="gopher://hole"):
        Storage("gopher://hole")
