"""The directory a job reads and writes: whole objects, and put-if-absent."""

import errno
import http.client
import os
import pickle
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fixture_types import Job

from pipeline.errors import JobError, JobStopped
from pipeline.storage.settings import StorageConfig, refuse_credentials
from pipeline.storage.storage import Storage, StorageGone, StorageRefused, absolute
from pipeline.storage.stores import ObjectChanged, stamp


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


def test_one_directory_has_one_absolute_url_however_it_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run/in").mkdir(parents=True)
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    spelt = ["../in", "./../in/.", f"{tmp_path}//in", f"{tmp_path}/run/../in"]
    assert {absolute(each) for each in spelt} == {str(tmp_path / "in")}
    (tmp_path / "link").symlink_to(tmp_path / "run/in")  # behind which `..` is another directory
    assert absolute(f"{tmp_path}/link/../in") != str(tmp_path / "in")


@pytest.mark.parametrize("url", ["s3://bucket/folder", "memory://folder"])
def test_a_url_with_a_scheme_is_absolute_already(url: str) -> None:
    assert absolute(url).replace("memory:///", "memory://") == url


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(JobError, match="gopher://hole"):
        Storage("gopher://hole")


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/folder",
        "https://user:secret@host/folder",
        "s3://AKIA:sec/secret/bPx@bucket/folder",
        "s3://AKIA:/secret@bucket/folder",
        "s3://AKIA:9/secret@bucket/folder",
        "s3a://AKIA:9secret/b@bucket/fol:der",
        "https://user:word?secret#secret@host/folder",
        "abfs://container:sec/secret@account.dfs.core.windows.net/folder",
        "abfs://container:secret@account.dfs.core.windows.net/folder",
        "https://secret@host/folder",
        "sftp://user:'secret/secret@host/folder",
        "ftp://user:a secret/secret@host/folder",
        "sftp://:secret/secret@host/folder",
        "https://user:123,secret/secret@host/folder",
        "sftp://me@example.org:secret/secret@host/folder",
        "https://account.blob.core.windows.net/container/a.parquet?sv=2026-01-01&sig=secret",
        "abfs://container@account.dfs.core.windows.net/folder?sig=secret",
        "https://bucket.s3.amazonaws.com/a.parquet?X-Amz-Credential=AKIA&X-Amz-Signature=secret",
        "https://storage.googleapis.com/bucket/a.parquet?X-Goog-Signature=secret",
        "https://host/a.parquet?api_key=secret",
        "https://host/a.parquet?part=1&access_token=se@secret",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(JobError, match="carries credentials") as refused:
        Storage(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["abfs", "abfss"])
def test_the_address_that_azure_gives_is_no_credential(scheme: str) -> None:
    refuse_credentials(f"{scheme}://container@account.dfs.core.windows.net/folder")


@pytest.mark.parametrize(
    "url",
    [
        "https://host:9000/folder/part@2", "s3://arn:aws:s3:eu-x-1:123456789012:accesspoint/name/a@b", "s3://bucket/a:b@c",
        "https://[::1]:9000/a@b", "s3://bucket/part-?.parquet",
        "abfs://container@account.dfs.core.windows.net/a:b@c", "abfs://container@localhost:10000/a@b",
    ],
)  # fmt: skip
def test_a_port_an_arn_and_a_name_with_a_colon_are_no_credentials(url: str) -> None:
    refuse_credentials(url)


@pytest.mark.parametrize(
    "endpoint",
    ["https://key:secret@host", "https://key:s/secret@host", "key:secret@host:9000", "host:9000", "ftp://host"],
)
def test_an_endpoint_is_a_url_without_credentials(endpoint: str) -> None:
    with pytest.raises(JobError, match="endpoint") as refused:
        Storage("s3://bucket", StorageConfig(s3_endpoint=endpoint))
    assert "secret" not in str(refused.value)


def test_settings_reach_the_s3_client() -> None:
    settings = StorageConfig(
        s3_endpoint="http://127.0.0.1:1", s3_region="eu-x-1", s3_path_style=True, s3_connect_timeout_s=3.0,
        s3_read_timeout_s=4.0, s3_profile="batch",
    )  # fmt: skip
    fs = Storage("s3://bucket/folder", settings, anonymous=True).fs
    assert (fs.anon, fs.client_kwargs) == (True, {"endpoint_url": "http://127.0.0.1:1", "region_name": "eu-x-1"})
    assert fs.config_kwargs["s3"] == {"addressing_style": "path"}
    assert (fs.config_kwargs["connect_timeout"], fs.config_kwargs["read_timeout"]) == (3.0, 4.0)
    assert fs.kwargs == {"profile": "batch"}
    assert (fs.config_kwargs["retries"], fs.retries) == ({"mode": "standard", "total_max_attempts": 1}, 1)


def test_a_public_input_is_read_without_credentials_and_the_output_is_not(job: Job) -> None:
    config = job(input="s3://public/in", output="s3://mine/out", s3_anonymous_input=True)
    assert (config.input_storage().fs.anon, config.output_storage().fs.anon) == (True, False)


def test_a_storage_travels_with_its_settings() -> None:
    storage = pickle.loads(pickle.dumps(Storage("s3://bucket/folder", StorageConfig(s3_region="eu-x-1"), True)))
    assert (storage.root, storage.fs.client_kwargs) == ("bucket/folder", {"region_name": "eu-x-1"})
    assert storage.fs.anon


@pytest.mark.parametrize(("patience", "at_first"), [(600.0, 30.0), (5.0, 5.0)])
def test_at_first_a_storage_is_waited_for_less_and_is_else_the_same(patience: float, at_first: float) -> None:
    settings = StorageConfig(s3_region="eu-x-1", s3_read_timeout_s=4.0, storage_patience_s=patience)
    storage = Storage("s3://bucket/folder", settings, True)
    first = storage.at_first()
    assert first.settings == settings.model_copy(update={"storage_patience_s": at_first})
    assert storage.settings == settings
    for each in (first, pickle.loads(pickle.dumps(first))):
        assert (each.url, each.root, each.fs.anon) == (storage.url, storage.root, True)
        assert (each.fs.client_kwargs, each.fs.config_kwargs) == (storage.fs.client_kwargs, storage.fs.config_kwargs)
        assert (each.settings, each._patience_s) == (first.settings, at_first)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip(f"this machine lets nobody mount: {made.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_is_waited_for_and_leaves_nothing_half_written(small_disk: Path) -> None:
    storage = Storage(str(small_disk), StorageConfig(storage_patience_s=20.0))
    (small_disk / "filler").write_bytes(bytes(900_000))
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(storage.write_if_absent, "data/unit", bytes(400_000))
        time.sleep(1.0)
        assert not writing.done()
        assert storage.names("data") == []
        (small_disk / "filler").unlink()
        assert writing.result(20)
    assert storage.read("data/unit") == bytes(400_000)


def test_a_disk_that_stays_full_is_a_resumable_end(small_disk: Path) -> None:
    storage = Storage(str(small_disk), StorageConfig(storage_patience_s=0.5))
    (small_disk / "filler").write_bytes(bytes(900_000))
    with pytest.raises(StorageGone, match=r"No space left on device.*start the job again to resume"):
        storage.write("data/unit", bytes(400_000))
    assert not any(small_disk.glob("data/*"))


def test_a_refusal_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where a folder should be")
    began = time.monotonic()
    with pytest.raises(StorageRefused, match=r"cannot be written to .*: is a file where a directory should be\?"):
        Storage(str(tmp_path)).write("data/unit", b"")
    assert time.monotonic() - began < 60  # of 600 s of patience


def test_an_answer_that_stays_cut_short_is_a_resumable_end(tmp_path: Path) -> None:
    def cut_short() -> bytes:
        raise http.client.IncompleteRead(b"half")

    with pytest.raises(StorageGone, match=r"reading .* has not worked .*start the job again to resume"):
        Storage(str(tmp_path), StorageConfig(storage_patience_s=0.1)).attempt("reading", cut_short)


def test_of_hidden_files_those_are_told_that_have_not_changed_for_long(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    for name in (".old", ".new", "seen"):
        storage.write(f"data/{name}", b"")
    (tmp_path / "data/.folder").mkdir()
    for name in (".old", "seen", ".folder"):
        os.utime(tmp_path / "data" / name, (0, 0))
    assert storage.hidden("data", 60.0) == ["data/.old"]
    assert storage.hidden("elsewhere", 60.0) == []


def test_a_write_whose_writer_was_interrupted_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Storage(str(tmp_path)).write("data/a.parquet", b"whole")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("at_first", [False, True])
def test_a_guarded_storage_asks_before_every_try(tmp_path: Path, at_first: bool) -> None:
    """Between two of them another job may have written what the first was to."""
    storage, file = Storage(str(tmp_path)), tmp_path / "a"
    asked: list[str] = []

    def check() -> None:
        asked.append(file.read_text() if file.exists() else "")
        if asked[-1] == "theirs":
            raise JobStopped("it is another job's")

    ours = storage.guarded(lambda: asked.append("before")).guarded(check)
    ours = ours.at_first() if at_first else ours
    put = ours._store.put

    def lost(path: str, content: bytes) -> None:
        put(path, b"theirs")
        raise ConnectionResetError

    ours.write("b", b"ours")
    assert (tmp_path / "b").read_bytes() == b"ours"
    ours._store.put = lost  # type: ignore[method-assign]
    with pytest.raises(JobStopped, match="another job's"):
        ours.write("a", b"ours")
    assert asked == ["before", "", "before", "", "before", "theirs"]
    for refused in (lambda: ours.remove(["a"]), lambda: ours.write_if_absent("c", b"ours")):
        with pytest.raises(JobStopped, match="another job's"):
            refused()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert file.read_bytes() == b"theirs"


def test_everything_in_a_folder_is_found_however_deep_and_hidden(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    (tmp_path / "data/a/.b").mkdir(parents=True)
    assert storage.everything("data") == []
    (tmp_path / "data/a/.b/.c").touch()
    assert storage.everything("data") == ["data/a/.b/.c"]


def test_a_disk_without_hard_links_is_no_place_for_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # what FAT answers

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageRefused, match="cannot hold an output, for its file system has no hard links"):
        Storage(str(tmp_path)).prove_put_if_absent()
    assert list(tmp_path.iterdir()) == []


def test_put_if_absent_is_proven_on_a_disk_and_nothing_is_left(tmp_path: Path) -> None:
    Storage(str(tmp_path)).prove_put_if_absent()
    assert list(tmp_path.iterdir()) == []


def test_a_reader_fetches_what_it_is_asked_for_and_no_more(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    (tmp_path / "a").write_bytes(content)
    with Storage(str(tmp_path)).open("a") as stream:
        stream.seek(-10, 2)
        assert (stream.read(), stream.tell()) == (content[-10:], len(content))
        stream.seek(5)
        assert stream.read(20) == content[5:25]


@pytest.mark.parametrize("patience", [0.0, 0.3])
def test_what_stands_on_a_bad_sector_is_refused_by_name_once_it_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    with Storage(str(tmp_path), StorageConfig(storage_patience_s=patience)).open("a") as stream:

        def broken(start: int, end: int) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(stream, "_opened", replace(stream._opened, read=broken))
        with pytest.raises(StorageRefused, match=r"/a' cannot be read \(.*Input/output error\)$"):
            stream.read(10)


def test_a_file_that_was_rewritten_shorter_is_another_at_once(tmp_path: Path) -> None:
    """Not one whose end is waited for."""
    file = tmp_path / "a"
    file.write_bytes(bytes(1 << 20))
    storage = Storage(str(tmp_path))
    with storage.open_path(str(file), stamp(storage.info(str(file)))) as stream:
        assert stream.read(10) == bytes(10)
        file.write_bytes(bytes(20))
        stream.seek(1 << 19)
        with pytest.raises(ObjectChanged, match=r"/a' has changed"):
            stream.read(50)
