"""What each kind of store has of its own; what all of them promise is held in `tests/stores`."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError
from s3fs.errors import translate_boto_error
from servers import BUCKET, S3Server

from pipeline.errors import JobError
from pipeline.storage.settings import StorageConfig
from pipeline.storage.storage import Storage, StorageRefused
from pipeline.storage.stores import is_of_content, stamp


@pytest.fixture
def on_s3(credentials: None, request: pytest.FixtureRequest) -> Callable[[str], Storage]:
    """A directory of the test's own on the S3 server."""
    return lambda name: Storage(f"s3://{BUCKET}/{request.node.originalname}/{name}")


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"size": 3, "ETag": '"abc-2"', "LastModified": datetime(2026, 1, 1, tzinfo=UTC)}, "3:etag:abc-2"),
        ({"size": 3, "etag": '"0x8D"', "last_modified": datetime(2026, 1, 1, tzinfo=UTC)}, "3:etag:0x8D"),
        ({"size": 3, "generation": "17", "etag": "CJ", "md5Hash": "m"}, "3:generation:17"),
        ({"size": 3, "blob_id": "f00"}, "3:etag:f00"),
        ({"size": 3, "mtime_ns": 1_000_000_001, "mtime": 1.0}, "3:time:1000000001"),
        ({"size": 3, "ETag": "", "LastModified": datetime(1970, 1, 1, 0, 0, 2, 5, UTC)}, "3:time:2000000000"),
        ({"size": 3, "Last-Modified": "Mon, 23 Nov 2026 20:00:00 GMT"}, "3:time:Mon, 23 Nov 2026 20:00:00 GMT"),
        ({"size": 0, "type": "directory"}, ""),
    ],
)
def test_every_store_has_a_stamp_that_changes_with_the_content(info: dict[str, object], expected: str) -> None:
    assert stamp(info) == expected


MD5 = "d41d8cd98f00b204e9800998ecf8427e"


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        (f"3:etag:{MD5}", True),
        (f"3:etag:{MD5}-3", True),  # of an upload in parts
        (f"3:etag:{MD5}-", False),
        (f"3:etag:{MD5[:-1]}", False),
        (f"3:etag:{MD5}\n", False),
        ("3:etag:0x8DC5B6E2A1F4C70", False),  # Azure's
        ("3:generation:17", False),
        ("3:time:1700000000000000000", False),
        ("", False),
    ],
)
def test_only_a_stamp_that_is_an_md5_says_nothing_but_the_content(tag: str, expected: bool) -> None:
    assert is_of_content(tag) == expected


def test_a_store_that_says_nothing_but_the_size_is_refused() -> None:
    with pytest.raises(JobError, match=r"says nothing of 'a' but its size"):
        stamp({"name": "a", "size": 3, "type": "file"})


def test_a_local_file_is_known_by_its_time_to_the_nanosecond_and_by_that_of_a_links_target(tmp_path: Path) -> None:
    file, link = tmp_path / "a", tmp_path / "link"
    file.write_bytes(b"old")
    link.symlink_to(file)
    os.utime(file, ns=(0, 1_700_000_000_000_000_000))
    storage = Storage(str(tmp_path))
    stamps = [stamp(storage.info(str(link)))]
    os.utime(file, ns=(0, 1_700_000_000_000_000_001))
    stamps.append(stamp(storage.info(str(link))))
    assert stamps == ["3:time:1700000000000000000", "3:time:1700000000000000001"]


def test_an_object_is_read_by_its_stamp_without_asking_for_it_first(on_s3: Callable[[str], Storage]) -> None:
    storage = on_s3("out")
    storage.write("a", b"content")
    path = storage.path("a")
    known = stamp(storage.info(path))
    storage.remove(["a"])
    with storage.open_path(path, known) as stream, pytest.raises(FileNotFoundError):
        stream.read()


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/a::b", "s3://bucket/a?versionId=7", "/", "//", "", " ", "s3://", "zip://x", "dir://x"],
)
def test_a_name_that_file_systems_would_take_apart_or_for_another_is_refused(url: str) -> None:
    """The root of a file system, less its slash, would be the directory that one is in; so would no name at all."""
    with pytest.raises(JobError, match="cannot be used"):
        Storage(url)


def test_objects_that_cannot_be_removed_are_named(
    on_s3: Callable[[str], Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = on_s3("out")
    storage.write("data/a", b"")
    answer = {"Errors": [{"Key": "data/a", "Code": "AccessDenied", "Message": "no"}], "ResponseMetadata": {}}
    monkeypatch.setattr(storage.fs, "call_s3", lambda *of, **options: answer)  # servers answer so, with status 200
    with pytest.raises(StorageRefused, match=r"refuses removing .*AccessDenied.*data/a"):
        storage.remove(["data/a"])


def test_a_folders_marker_and_a_folder_named_like_an_object_are_no_objects(on_s3: Callable[[str], Storage]) -> None:
    storage = on_s3("out")
    storage.write("data/x", b"1")
    for key in ("data/", "data/x/y", "data/z/"):
        storage.fs.call_s3("put_object", Bucket=BUCKET, Key=storage.path(key).split("/", 1)[1], Body=b"")
    assert storage.names("data") == ["data/x"]
    assert storage.stamps("data")["data/x"].startswith("1:etag:")


def test_an_upload_in_parts_has_one_stamp_and_is_written_once(on_s3: Callable[[str], Storage]) -> None:
    storage = on_s3("out")
    content = bytes(101 << 20)  # s3fs sends more than 100 MiB in parts
    assert storage.write_if_absent("data/a", content)
    assert not storage.write_if_absent("data/a", content)
    assert storage.stamps("data")["data/a"] == stamp(storage.info(storage.path("data/a")))


def test_an_upload_in_parts_whose_end_is_answered_to_nobody_is_made_again(
    on_s3: Callable[[str], Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload that s3fs abandons then is no more: it is whole."""
    storage = on_s3("out")
    call, lost = storage.fs._call_s3, []

    async def cut(method: str, *given: Any, **options: Any) -> Any:
        if method == "abort_multipart_upload":
            error = {"Error": {"Code": "NoSuchUpload", "Message": "The specified upload does not exist."}}
            raise translate_boto_error(ClientError(error, "AbortMultipartUpload"))  # type: ignore[arg-type]
        answer = await call(method, *given, **options)
        if method == "complete_multipart_upload" and not lost:
            lost.append(answer)
            raise ConnectionClosedError(endpoint_url="http://127.0.0.1")
        return answer

    monkeypatch.setattr(storage.fs, "_call_s3", cut)
    content = bytes(101 << 20)
    storage.write("data/a", content)
    assert lost
    assert storage.info(storage.path("data/a"))["size"] == len(content)


@pytest.mark.usefixtures("credentials")
def test_a_roles_credentials_are_asked_for_again_where_the_machine_is_busy(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metadata service is a double, which answers the second time."""
    role = {
        "Code": "Success", "AccessKeyId": s3.environment["AWS_ACCESS_KEY_ID"], "Token": "",
        "SecretAccessKey": s3.environment["AWS_SECRET_ACCESS_KEY"], "Expiration": "2199-01-01T00:00:00Z",
    }  # fmt: skip
    roles = "/latest/meta-data/iam/security-credentials/"
    answers = {"/latest/api/token": "token", roles: "role", f"{roles}role": json.dumps(role)}
    asked: list[str] = []

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            content = answers[self.path].encode()
            self.send_response(503 if asked.count(self.path) == 1 else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
        # Of its own, as a worker process has one: no client that has credentials is kept for this.
        storage = Storage(f"s3://{BUCKET}/of_a_role", StorageConfig(s3_read_timeout_s=61.0))
        storage.write("a", b"1")
        assert storage.read("a") == b"1"
        server.shutdown()
    assert asked.count(f"{roles}role") == 2


def test_a_write_that_fails_leaves_no_scratch_file(tmp_path: Path) -> None:
    (tmp_path / "report.html/mine").mkdir(parents=True)
    with pytest.raises(StorageRefused, match="refuses writing"):
        Storage(str(tmp_path)).write("report.html", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
