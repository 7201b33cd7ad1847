"""A directory on any fsspec file system: whole-object reads, one-PUT writes, put-if-absent."""

from __future__ import annotations

import errno
import io
import os
import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import botocore.exceptions
import fsspec
from fsspec.implementations.local import LocalFileSystem
from s3fs import S3FileSystem
from s3fs.utils import FileExpired

from pipeline.errors import JobError, JobStopped, one_line
from pipeline.storage_settings import StorageSettings
from pipeline.transient import is_transient, patiently

Result = TypeVar("Result")

FIRST_PATIENCE_S = 30.0
BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")  # of a glob


class StorageRefused(JobError):
    """The storage says no, and would again: no permission, no such bucket, no credentials."""


class ObjectChanged(JobError):
    """An object is no longer the one that was asked for."""


class StorageGone(JobStopped):
    """The storage has not answered for as long as the job was willing to wait."""


def absolute(url: str) -> str:
    """A URL that means the same in every process, whatever its working directory. Raises JobError."""
    storage = Storage(url)
    full: str = storage.root if storage.is_local else storage.fs.unstrip_protocol(storage.root)
    return full


class Storage:
    """A root directory and the objects below it; paths are relative to the root.

    Every operation waits for throttling and outages to pass, and raises StorageGone when they don't, StorageRefused
    where waiting would not help.
    """

    def __init__(self, url: str, settings: StorageSettings | None = None) -> None:
        """Raises JobError for a scheme that is unknown or not installed, or a URL that carries credentials."""
        self.url = url
        self.settings = settings or StorageSettings()
        options = self.settings.options(url)
        try:
            self.fs, root = fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            raise JobError(f"storage {url!r} cannot be used: {error}") from error
        except botocore.exceptions.BotoCoreError as error:
            raise StorageRefused(f"storage {url!r} cannot be used: {one_line(error)}") from error
        self.fs.retries = 1  # s3fs's own, beneath ours
        self.root = root.rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def __reduce__(self) -> tuple[Any, ...]:
        return Storage, (self.url, self.settings)

    def at_first(self) -> Storage:
        """The same storage for the first contact: one that has never answered is a mistake sooner than an outage."""
        patience = min(self.settings.patience_s, FIRST_PATIENCE_S)
        return Storage(self.url, replace(self.settings, patience_s=patience))

    def path(self, name: str) -> str:
        """Full path of an object, for `self.fs`."""
        return f"{self.root}/{name}"

    def relative(self, path: str) -> str:
        """A path of this file system as seen from the root, which may be a file or a glob."""
        if path == self.root:
            return path.rsplit("/", 1)[-1]
        base = self.root if path.startswith(f"{self.root}/") else fixed_part(self.root)
        return path.removeprefix(base).lstrip("/")

    def attempt(self, what: str, operation: Callable[[], Result]) -> Result:
        """Result of an operation on `self.fs`, tried again while its errors may pass.

        Raises FileNotFoundError and FileExistsError as they come, StorageRefused, StorageGone.
        """
        try:
            return patiently(operation, self.settings.patience_s, f"{what} in storage {self.url!r}")
        except (FileNotFoundError, FileExistsError):
            raise
        except (OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            if is_transient(error):
                raise StorageGone(
                    f"{what} in storage {self.url!r} has not worked for {self.settings.patience_s:.0f} s "
                    f"({one_line(error)}): what is committed stays, start the job again to resume"
                ) from error
            raise StorageRefused(
                f"storage {self.url!r} refuses {what} ({one_line(error)}): check its name, its permissions and the "
                "credentials in the environment, profile or role"
            ) from error

    def stamps(self, folder: str, suffix: str = "") -> dict[str, str]:
        """Objects in a folder, sorted by name (with the folder); what each stands for changes when the object does."""
        try:
            found = self.attempt("listing", lambda: self.fs.ls(self.path(folder), detail=True, refresh=True))
        except FileNotFoundError:
            return {}
        infos = {f"{folder}/{info['name'].rsplit('/', 1)[-1]}": info for info in found}
        visible = sorted(name for name in infos if _is_visible(name.rsplit("/", 1)[-1], suffix))
        return {name: stamp(infos[name]) for name in visible}

    def names(self, folder: str, suffix: str = "") -> list[str]:
        """Names (with their folder) of the objects in a folder, sorted; [] if there is no such folder."""
        return list(self.stamps(folder, suffix))

    def read(self, name: str) -> bytes | None:
        """An object's content, None if there is none."""
        try:
            return self.attempt("reading", lambda: bytes(self.fs.cat_file(self.path(name))))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object whole, replacing an older one."""
        path = self.path(name)
        put = self._replace_local if self.is_local else self._put
        self._write(lambda: put(path, content))

    def write_if_absent(self, name: str, content: bytes) -> bool:
        """Write an object whole unless one of that name exists; whether this call wrote it.

        False may also mean that this call's own write went through and its answer was lost: compare the content.
        """
        path = self.path(name)
        put = self._link_local if self.is_local else self._create
        return self._write(lambda: put(path, content))

    def remove(self, names: list[str]) -> None:
        """Remove objects, those that are gone already included."""
        for start in range(0, len(names), 1000):
            paths = [self.path(name) for name in names[start : start + 1000]]
            self.attempt("removing", partial(self._remove, paths))

    def open(self, name: str) -> Any:
        """A readable file object."""
        return self.open_path(self.path(name))

    def open_path(self, path: str, stamp: str | None = None) -> Any:
        """A readable file object that fetches just the ranges asked for, each as patiently as any other operation.

        With a stamp, opening and reading raise ObjectChanged if the object is no longer the one that it stands for.
        Where the store cannot say so with every range, `check_unchanged` must, once all is read.
        """
        # Read-ahead would download what column projection leaves out.
        options = {} if self.is_local else {"cache_type": "none"}
        return _PatientReader(self, path, options, stamp)

    def check_unchanged(self, path: str, wanted: str | None) -> None:
        """Raises ObjectChanged if what was read through an open file may be of another content than `wanted`."""
        if wanted is not None and not isinstance(self.fs, S3FileSystem):  # whose every read has an If-Match
            info = self.attempt("reading", lambda: self.fs.info(path))
            if stamp(info) != wanted:
                raise changed(path)

    def _write(self, operation: Callable[[], Result]) -> Result:
        try:
            return self.attempt("writing", operation)
        except (FileNotFoundError, FileExistsError) as error:
            raise StorageRefused(
                f"storage {self.url!r} cannot be written to ({one_line(error)}): is its bucket there?"
            ) from error

    def _put(self, path: str, content: bytes, **options: Any) -> None:
        self.fs.pipe_file(path, content, **options)  # one PUT up to 100 MB, parts above

    def _create(self, path: str, content: bytes) -> bool:
        try:
            self._put(path, content, mode="create")  # If-None-Match: * on S3
        except FileExistsError:
            return False
        except OSError as error:
            # s3fs maps a 412 to EINVAL when the server's message does not name the condition.
            if error.errno == errno.EINVAL and not is_transient(error) and self.fs.exists(path):
                return False
            raise
        return True

    def _replace_local(self, path: str, content: bytes) -> None:
        os.replace(self._write_scratch(path, content), path)

    def _link_local(self, path: str, content: bytes) -> bool:
        scratch = self._write_scratch(path, content)
        try:
            os.link(scratch, path)  # unlike a rename, refuses to replace
        except FileExistsError:
            return False
        finally:
            os.unlink(scratch)
        return True

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
        except OSError:
            if os.path.exists(scratch):
                os.unlink(scratch)
            raise
        return scratch

    def _remove(self, paths: list[str]) -> None:
        if not self.is_local:
            self.fs.rm(paths)
            return
        for path in paths:
            if os.path.exists(path):
                os.unlink(path)


class _PatientReader(io.RawIOBase):
    """A file whose reads are tried again where they may be."""

    def __init__(self, storage: Storage, path: str, options: dict[str, Any], wanted: str | None) -> None:
        """Raises ObjectChanged."""
        self._storage = storage
        self._path = path
        self._file = storage.attempt("reading", lambda: storage.fs.open(path, "rb", **options))
        if wanted is not None:
            info = getattr(self._file, "details", None) or storage.attempt("reading", lambda: storage.fs.info(path))
            if stamp(info) != wanted:
                self._file.close()
                raise changed(path)
        self._size = int(storage.attempt("reading", lambda: self._file.seek(0, io.SEEK_END)))
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._size - self._position)
        if wanted <= 0:
            return 0
        content = self._storage.attempt("reading", lambda: self._fetch(wanted))
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _fetch(self, wanted: int) -> bytes:
        self._file.seek(self._position)
        try:
            content: bytes = self._file.read(wanted)
        except FileExpired as error:
            raise changed(self._path) from error
        if len(content) < wanted:
            raise ConnectionError(f"{wanted} bytes were asked for and {len(content)} came")
        return content


def changed(path: str) -> ObjectChanged:
    return ObjectChanged(
        f"file {path!r} has changed since the job was planned, and its new content is not mixed in: put the old one "
        "back and start the job again, or for the new one name another output, use --fresh or --incremental"
    )


def stamp(info: dict[str, Any]) -> str:
    """Of an object, from what its file system says of it: changes when the object does."""
    return f"{info['size']}:{info.get('ETag') or info.get('mtime') or info.get('LastModified') or ''}"


def _is_visible(name: str, suffix: str) -> bool:
    """Not a scratch file."""
    return bool(name) and not name.startswith(".") and name.endswith(suffix)


def fixed_part(root: str) -> str:
    """The directories of a glob before its first pattern; any other path itself."""
    first = re.search(rf"[*?\[]|{BRACES.pattern}", root)
    return root if first is None else root[: first.start()].rpartition("/")[0]
