"""Promises that a run relies on are kept on disks, on S3, and by Azure's and Google's stores."""

import io
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from emulators import Emulator, hasty
from engine_double import Echo, EchoBackend
from inline_session import run_until

from pipeline.config import JobConfig
from pipeline.errors import JobError
from pipeline.inspection import inspect, verify
from pipeline.run import run_job
from pipeline.storage.storage import Storage, StorageGone, StorageRefused, absolute
from pipeline.storage.stores import ObjectChanged, stamp

ODD_NAMES = ["a b", "a+b", "a%41", "a#b", "a?b=c", "ümläut/日本", "x*y", "a&b", "[1]", "{a,b}", "a//b", "'\"", ".x"]


def test_of_many_writers_of_one_name_exactly_one_wins_and_its_content_is_whole(folder: str) -> None:
    writers = 16
    contents = [bytes([writer]) * 200_000 for writer in range(writers)]
    together = Barrier(writers)

    def write(content: bytes) -> bool:
        storage = Storage(folder)
        together.wait()
        return storage.write_if_absent("_commits/unit.json", content)

    with ThreadPoolExecutor(writers) as pool:
        won = list(pool.map(write, contents))
    assert sum(won) == 1
    assert Storage(folder).read("_commits/unit.json") == contents[won.index(True)]


def test_a_changed_object_is_never_read_as_the_one_that_was_planned(folder: str) -> None:
    storage = Storage(folder)
    storage.write("a", b"the old content")
    path = storage.path("a")
    old = stamp(storage.info(path))
    with storage.open_path(path, old) as stream:
        assert stream.read(3) == b"the"
        storage.write("a", b"the new content")  # of the same length
        with pytest.raises(ObjectChanged, match="has changed"):
            read_rest(storage, path, stream, old)
    with pytest.raises(ObjectChanged, match="has changed"), storage.open_path(path, old) as stream:
        stream.read()
    with storage.open_path(path, stamp(storage.info(path))) as stream:
        assert stream.read() == b"the new content"


def read_rest(storage: Storage, path: str, stream: Any, wanted: str) -> None:
    stream.read()
    assert storage.is_local, "others refuse each range of another object"
    storage.check_unchanged(path, wanted)


def test_a_listing_and_an_object_give_one_stamp(server: Emulator) -> None:
    storage = Storage(server.folder())
    storage.write("data/a", b"content")
    assert storage.stamps("data") == {"data/a": stamp(storage.info(storage.path("data/a")))}
    size, kind, _ = storage.stamps("data")["data/a"].split(":")
    assert (size, kind) == ("7", "etag" if server.scheme == "abfs" else "generation")


def test_removing_takes_what_is_absent_for_removed_and_no_name_for_a_pattern(folder: str) -> None:
    mine, other = Storage(f"{folder}/run[1]"), Storage(f"{folder}/run1")
    for storage in (mine, other):
        for name in "ab":
            storage.write(f"data/{name}", b"")
    mine.remove(["data/never", "data/a", "data/*", "data/b"])
    mine.remove(["data/never"])
    assert (mine.names("data"), other.names("data")) == ([], ["data/a", "data/b"])


def test_names_with_odd_characters_are_just_names(folder: str) -> None:
    for name in ODD_NAMES:
        storage = Storage(f"{folder}/{name}")
        assert (storage.write_if_absent("o", b"1"), storage.write_if_absent("o", b"2")) == (True, False), name
        with storage.open_path(storage.path("o"), stamp(storage.info(storage.path("o")))) as stream:
            assert stream.read() == b"1", name
        storage.write("o", b"3")
        assert storage.read("o") == b"3", name
        storage.remove(["o"])
        assert storage.read("o") is None, name


def test_put_if_absent_is_proven_and_nothing_is_left(server: Emulator) -> None:
    storage = Storage(server.folder())
    storage.prove_put_if_absent()
    assert storage.fs.find(storage.root) == []


def test_a_store_that_ignores_put_if_absent_is_refused(forgetful: Emulator) -> None:
    storage = Storage(forgetful.folder())
    with pytest.raises(StorageRefused, match="cannot hold an output, for it replaces an object"):
        storage.prove_put_if_absent()
    assert storage.fs.find(storage.root) == []


def test_a_bucket_that_is_not_there_is_said(server: Emulator) -> None:
    nowhere = Storage(f"{server.scheme}://nowhere/run")
    assert (nowhere.read("a"), nowhere.names("data")) == (None, [])
    with pytest.raises(StorageRefused, match="nowhere"):
        nowhere.write("a", b"")


@pytest.mark.parametrize("operation", ["reading", "writing", "removing", "listing"])
def test_an_outage_is_waited_for_and_then_said(server: Emulator, operation: str) -> None:
    if server.scheme == "gs":
        pytest.skip("gcsfs tries again by itself for half a minute")
    storage = hasty(server.folder())
    storage.write("data/a", b"")
    server.stop()
    calls = {
        "reading": lambda: storage.read("data/a"),
        "writing": lambda: storage.write("data/a", b""),
        "removing": lambda: storage.remove(["data/a"]),
        "listing": lambda: storage.names("data"),
    }
    began = time.monotonic()
    with pytest.raises(StorageGone, match=f"{operation} in storage .* has not worked for 1 s"):
        calls[operation]()
    assert time.monotonic() - began < 20


def test_azures_own_address_names_container_and_account(server: Emulator) -> None:
    if server.scheme != "abfs":
        pytest.skip("of Azure")
    url = "abfs://corpus@devstoreaccount1.dfs.core.windows.net/run-of-tests"
    storage = Storage(url)
    assert (storage.root, absolute(url)) == ("corpus/run-of-tests", url)
    storage.prove_put_if_absent()


@pytest.mark.usefixtures("inline")
def test_a_job_reads_writes_and_resumes_there(server: Emulator) -> None:
    folder = server.folder()
    texts = [f"row {row}" for row in range(8)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), sink)
    Storage(f"{folder}/in").write("a.parquet", sink.getvalue())
    config = JobConfig(
        input=f"{folder}/in", output=f"{folder}/out", prompt_format="raw", rows_per_unit=2, max_new_tokens=40
    )
    run_until(config, EchoBackend(Echo("said: ")), units=3)
    assert run_job(config, EchoBackend(Echo("said: "))).rows_resumed == 6
    storage = Storage(config.output)
    found = inspect(storage)
    assert verify(storage, found) == []
    rows = [pq.read_table(storage.open(commit.file)).to_pylist() for commit in found.commits]
    assert sorted(row["text"] for part in rows for row in part) == texts
    Storage(f"{folder}/in").write("a.parquet", sink.getvalue()[:-1] + b"2")
    with pytest.raises(JobError, match=r"a\.parquet"):
        run_job(config, EchoBackend(Echo("said: ")))
