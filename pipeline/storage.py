"""A directory on any fsspec file system: whole-object reads, one-PUT writes, put-if-absent."""

from __future__ import annotations

import errno
import os
import uuid
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import JobError


def absolute(url: str) -> str:
    """A URL that means the same in every process, whatever its working directory. Raises JobError."""
    storage = Storage(url)
    full: str = storage.root if storage.is_local else storage.fs.unstrip_protocol(storage.root)
    return full


class Storage:
    """A root directory and the objects below it; paths are relative to the root."""

    def __init__(self, url: str) -> None:
        """Raises JobError for a scheme that is unknown or not installed."""
        self.url = url
        try:
            # Listings are never cached: other processes write here too.
            self.fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise JobError(f"storage {url!r} cannot be used: {error}") from error
        self.root = root.rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def path(self, name: str) -> str:
        """Full path of an object, for `self.fs`."""
        return f"{self.root}/{name}"

    def relative(self, path: str) -> str:
        """A path of this file system as seen from the root, which may be a file or a glob."""
        below = path.removeprefix(self.root.split("*")[0]).lstrip("/")
        return below or path.rsplit("/", 1)[-1]

    def names(self, folder: str, suffix: str = "") -> list[str]:
        """Names (with their folder) of the objects in a folder, sorted; [] if there is no such folder."""
        try:
            paths = self.fs.ls(self.path(folder), detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{path.rsplit('/', 1)[-1]}" for path in paths if path.endswith(suffix))

    def read(self, name: str) -> bytes | None:
        """An object's content, None if there is none."""
        try:
            content: bytes = self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write an object whole, replacing an older one."""
        path = self.path(name)
        if not self.is_local:
            self.fs.pipe_file(path, content)
            return
        scratch = self._write_scratch(path, content)
        os.replace(scratch, path)

    def write_if_absent(self, name: str, content: bytes) -> bool:
        """Write an object whole unless one of that name exists; whether this call wrote it.

        False may also mean that this call's own write went through and its answer was lost: compare the content.
        """
        path = self.path(name)
        if self.is_local:
            scratch = self._write_scratch(path, content)
            try:
                os.link(scratch, path)  # unlike a rename, refuses to replace
            except FileExistsError:
                return False
            finally:
                os.unlink(scratch)
            return True
        try:
            self.fs.pipe_file(path, content, mode="create")  # If-None-Match: * on S3
        except FileExistsError:
            return False
        except OSError as error:
            # s3fs maps a 412 to EINVAL when the server's message does not name the condition.
            if error.errno == errno.EINVAL and self.fs.exists(path):
                return False
            raise
        return True

    def remove(self, names: list[str]) -> None:
        if names:
            self.fs.rm([self.path(name) for name in names])

    def open(self, name: str) -> Any:
        """A readable file object."""
        return self.fs.open(self.path(name), "rb")

    def _write_scratch(self, path: str, content: bytes) -> str:
        """Content under a name beside `path` that no reader looks at."""
        folder, name = os.path.split(path)
        os.makedirs(folder, exist_ok=True)
        scratch = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
        with open(scratch, "wb") as stream:
            stream.write(content)
        return scratch
