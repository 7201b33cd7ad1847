"""What each kind of store does in its own way: saying what an object's content is, reading just that content, writing
only if absent, removing.

Errors come out as the libraries raise them; waiting for those that pass is `Storage`'s.
"""

import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import botocore.exceptions
from fsspec.asyn import AsyncFileSystem, _run_coros_in_chunks, sync
from fsspec.implementations.local import LocalFileSystem
from s3fs import S3FileSystem

from pipeline.errors import JobError
from pipeline.storage.retry import is_transient, status_of

MOST_REMOVED = 1000  # objects in one request, as S3 has it
# What file systems call the time of an object's last change.
TIMES = ("mtime", "last_modified", "LastModified", "Last-Modified", "modificationTime", "last_write_time", "modify")
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class ObjectChanged(JobError):
    """An object is no longer the one that was asked for."""


class Unfit(JobError):
    """What stands under a name cannot be what it is read as: no file, or far too large a one."""


class NoPutIfAbsent(JobError):
    """The store cannot write an object only if there is none of its name."""


def stamp(info: dict[str, Any]) -> str:
    """What a store says of an object's content, which changes with it: its size, and its generation, ETag or time.

    "" of a directory. Raises JobError for an object of which the store says nothing but its size.
    """
    if info.get("type") == "directory":
        return ""
    if info.get("generation"):  # Google's, whose ETag changes with an object's labels too
        return f"{info['size']}:generation:{info['generation']}"
    tag = info.get("ETag") or info.get("etag") or info.get("blob_id") or info.get("Content-MD5") or info.get("Digest")
    if tag:
        tag = str(tag).strip('"')
        return f"{info['size']}:etag:{tag}"
    if "mtime_ns" in info:
        return f"{info['size']}:time:{info['mtime_ns']}"
    name, time = next(((name, info[name]) for name in TIMES if info.get(name)), ("", None))
    if time is None:
        raise JobError(
            f"the store says nothing of {info.get('name')!r} but its size, so that a change of its content would not "
            "be seen: copy it to a disk or a bucket"
        )
    if isinstance(time, datetime):
        # S3 lists milliseconds, and answers with seconds when asked for the one object.
        time = int((time.replace(microsecond=0) if name == "LastModified" else time).timestamp() * 1e9)
    elif isinstance(time, float):
        time = round(time * 1e9)
    return f"{info['size']}:time:{time}"


def is_of_content(stamp: str) -> bool:
    """Whether it says nothing but what the object's content is: an ETag that is an MD5, of the object or its parts."""
    return re.fullmatch("[0-9]+:etag:[0-9a-f]{32}(-[0-9]+)?", stamp) is not None


@dataclass(frozen=True, slots=True)
class Opened:
    """An object that can be read in ranges [start, end)."""

    size: int
    read: Callable[[int, int], bytes]  # raises ObjectChanged where the store can tell that it is another by now
    close: Callable[[], None] = lambda: None


class Store:
    """Any file system that fsspec knows; those that can do better are below."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def info(self, path: str) -> dict[str, Any]:
        """What the file system says of an object. Raises FileNotFoundError."""
        return dict(self.fs.info(path))

    def pins(self, stamp: str) -> bool:
        """Whether every read of an object opened by this stamp is of that content, or raises ObjectChanged."""
        return False

    def open(self, path: str, wanted: str | None) -> Opened:
        """Raises ObjectChanged if the object is not the one that the stamp stands for; FileNotFoundError."""
        # Read-ahead would download what column projection leaves out.
        file = self.fs.open(path, "rb", cache_type="none")

        def read(start: int, end: int) -> bytes:
            file.seek(start)
            content = bytes(file.read(end - start))
            # Another is found out once all is read; of a shorter one what it lacks would be waited for until then.
            if wanted is not None and len(content) < end - start and stamp(self.info(path)) != wanted:
                raise changed(path)
            return content

        try:
            # After opening: whatever takes the object's place from here on is seen once all is read.
            if wanted is not None and stamp(self.info(path)) != wanted:
                raise changed(path)
            return Opened(int(file.seek(0, os.SEEK_END)), read, file.close)
        except BaseException:
            file.close()
            raise

    def whole(self, path: str, limit: int | None) -> bytes:
        """An object's content. Raises Unfit for more than `limit` bytes, of which no more are fetched."""
        if limit is None:
            return bytes(self.fs.cat_file(path))
        try:
            content = bytes(self.fs.cat_file(path, start=0, end=limit + 1))
        except Exception as error:
            # Of what is empty there is no range.
            if isinstance(error, FileNotFoundError) or is_transient(error) or self.fs.info(path)["size"]:
                raise
            return b""
        return _within(content, limit)

    def put(self, path: str, content: bytes) -> None:
        """Write an object whole, replacing an older one."""
        self.fs.pipe_file(path, content)

    def create(self, path: str, content: bytes) -> bool:
        """Write an object whole unless there is one of that name; whether it was written."""
        try:
            self.fs.pipe_file(path, content, mode="create")  # If-None-Match: *, or ifGenerationMatch=0
        except FileExistsError:
            return False
        except Exception as error:
            if status_of(error) == 412:  # with a message that the library does not know
                return False
            if status_of(error) == 501:
                raise NoPutIfAbsent("it does not know the condition") from error
            raise
        return True

    def remove(self, paths: list[str]) -> None:
        """Remove objects, those that are gone already included; at most MOST_REMOVED.

        Not by the file system's own `rm`: it takes names for patterns, and some file systems do not say what failed.
        """
        if isinstance(self.fs, AsyncFileSystem):
            sync(self.fs.loop, _all, [self.fs._rm_file(path) for path in paths])
            return
        for path in paths:
            with suppress(FileNotFoundError):
                self.fs.rm_file(path)


class LocalStore(Store):
    """A disk, or whatever is mounted like one."""

    def info(self, path: str) -> dict[str, Any]:
        found = os.stat(path)
        # No inode: it is another on each node that mounts a bucket as a file system, and once a backup is put back.
        return {**self.fs.info(path), "size": found.st_size, "mtime_ns": found.st_mtime_ns}

    def whole(self, path: str, limit: int | None) -> bytes:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise Unfit("it is no file")
        if limit is not None and found.st_size > limit:
            raise _too_large(limit)
        with open(path, "rb") as file:
            return file.read() if limit is None else _within(file.read(limit + 1), limit)

    def put(self, path: str, content: bytes) -> None:
        scratch = self._write_scratch(path, content)
        try:
            os.replace(scratch, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(scratch)
            raise

    def create(self, path: str, content: bytes) -> bool:
        scratch = self._write_scratch(path, content)
        try:
            os.link(scratch, path)  # unlike a rename, refuses to replace
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in NO_HARD_LINKS:
                raise NoPutIfAbsent("its file system has no hard links") from error
            raise
        finally:
            os.unlink(scratch)
        return True

    def remove(self, paths: list[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)

    def _write_scratch(self, path: str, content: bytes) -> str:
        """Content under a name beside `path` that no reader looks at."""
        folder, name = os.path.split(path)
        os.makedirs(folder, exist_ok=True)
        scratch = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
        try:
            with open(scratch, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())  # a commit must not outlive its data when the machine goes down
        except BaseException:  # Ctrl-C too
            with suppress(FileNotFoundError):
                os.unlink(scratch)
            raise
        return scratch


class PinningStore(Store):
    """A store that reads a range of an object only if it still is the one that was asked for."""

    kind = "etag"  # of stamps that it can read by

    def pins(self, stamp: str) -> bool:
        return stamp.split(":", 2)[1:2] == [self.kind]

    def open(self, path: str, wanted: str | None) -> Opened:
        found = wanted or stamp(self.info(path))
        if not self.pins(found):
            return super().open(path, wanted)
        size, _, tag = found.split(":", 2)

        def read(start: int, end: int) -> bytes:
            try:
                return self.read(path, tag, start, end)
            except Exception as error:
                if status_of(error) == 412:
                    raise changed(path) from error
                raise

        return Opened(int(size), read)

    def read(self, path: str, tag: str, start: int, end: int) -> bytes:
        """A range of the object that is known by `tag`. Raises ObjectChanged."""
        raise NotImplementedError


class S3Store(PinningStore):
    def read(self, path: str, tag: str, start: int, end: int) -> bytes:
        content, found = sync(self.fs.loop, self._get, path, tag, start, end)
        if found.strip('"') != tag:  # of a server that knows no If-Match
            raise changed(path)
        return bytes(content)

    async def _get(self, path: str, tag: str, start: int, end: int) -> tuple[bytes, str]:
        bucket, key, _ = self.fs.split_path(path)
        answer = await self.fs._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", IfMatch=f'"{tag}"'
        )
        async with answer["Body"] as body:
            return await body.read(), answer.get("ETag", "")

    def remove(self, paths: list[str]) -> None:
        bucket = self.fs.split_path(paths[0])[0]
        keys = [{"Key": self.fs.split_path(path)[1]} for path in paths]
        answer = self.fs.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
        # Answered with 200, whatever became of the single objects.
        failed = [error for error in answer.get("Errors", []) if error.get("Code") != "NoSuchKey"]
        if failed:
            message = f"{failed[0].get('Key')}: {failed[0].get('Message')}"
            raise botocore.exceptions.ClientError({"Error": {**failed[0], "Message": message}}, "DeleteObjects")


class AzureStore(PinningStore):
    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        fs.service_client._config.retry_policy.total_retries = 0  # its own, beneath ours, of a minute and more

    def read(self, path: str, tag: str, start: int, end: int) -> bytes:
        return bytes(sync(self.fs.loop, self._get, path, tag, start, end))

    async def _get(self, path: str, tag: str, start: int, end: int) -> bytes:
        from azure.core import MatchConditions

        container, blob, _ = self.fs.split_path(path)
        async with self.fs.service_client.get_blob_client(container, blob) as client:
            stream = await client.download_blob(
                offset=start, length=end - start, etag=f'"{tag}"', match_condition=MatchConditions.IfNotModified
            )
            return bytes(await stream.readall())


class GoogleStore(PinningStore):
    kind = "generation"

    def read(self, path: str, tag: str, start: int, end: int) -> bytes:
        query = urlencode({"generation": tag})
        try:
            headers, content = self.fs.call(
                "GET", f"{self.fs.url(path)}&{query}", headers={"Range": f"bytes={start}-{end - 1}"}
            )
        except FileNotFoundError as error:  # another has taken its place, or none
            raise changed(path) from error
        if headers.get("x-goog-generation", tag) != tag:  # of a server that knows no generations
            raise changed(path)
        return bytes(content)


def store_of(fs: Any) -> Store:
    """The store behind a file system."""
    if isinstance(fs, LocalFileSystem):
        return LocalStore(fs)
    if isinstance(fs, S3FileSystem):
        return S3Store(fs)
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if "abfs" in protocols:
        return AzureStore(fs)
    return GoogleStore(fs) if "gs" in protocols else Store(fs)


def _within(content: bytes, limit: int) -> bytes:
    if len(content) > limit:
        raise _too_large(limit)
    return content


def _too_large(limit: int) -> Unfit:
    return Unfit(f"it holds more than {limit:,} bytes")


def changed(path: str) -> ObjectChanged:
    return ObjectChanged(
        f"file {path!r} has changed since the job was planned, and its new content is not mixed in: put the old one "
        "back and start the job again; for the new one name another output or --fresh, which an --incremental run can "
        "do without"
    )


async def _all(removals: list[Coroutine[Any, Any, Any]]) -> None:
    """Wait for all, and raise what went wrong with the first."""
    results = await _run_coros_in_chunks(removals, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, FileNotFoundError):
            raise result
