"""A directory on any fsspec file system: whole-object reads, one-PUT writes, put-if-absent."""

import errno
import os
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import botocore.exceptions
import fsspec
from fsspec.spec import AbstractBufferedFile

from pipeline.errors import JobError, JobStopped, one_line
from pipeline.storage.patterns import fixed_part
from pipeline.storage.retry import is_storage_error, is_transient, patiently
from pipeline.storage.settings import StorageConfig, file_system_options
from pipeline.storage.stores import MOST_REMOVED, LocalStore, NoPutIfAbsent, Opened, changed, stamp, store_of

Result = TypeVar("Result")

FIRST_PATIENCE_S = 30.0


class StorageRefused(JobError):
    """The storage says no, and would again: no permission, no such bucket, no credentials."""


class StorageGone(JobStopped):
    """The storage has not answered for as long as the job was willing to wait."""


def absolute(url: str) -> str:
    """A URL that means the same in every process, whatever its working directory. Raises JobError."""
    storage = Storage(url)
    if storage.is_local:
        plain = os.path.normpath(storage.root)
        # Behind a symbolic link `..` is another directory than what the name says.
        return plain if os.path.realpath(plain) == os.path.realpath(storage.root) else str(storage.root)
    if "@" in url.partition("://")[2].partition("/")[0]:
        return url.rstrip("/")  # of Azure, whose file system would leave out the account
    return str(storage.fs.unstrip_protocol(storage.root))


class Storage:
    """A root directory and the objects below it; paths are relative to the root.

    Every operation waits for throttling and outages to pass, and raises StorageGone when they don't, StorageRefused
    where waiting would not help.
    """

    def __init__(self, url: str, settings: StorageConfig | None = None, anonymous: bool = False) -> None:
        """Raises JobError for a scheme that is unknown or not installed, or a URL that carries credentials."""
        self.url = url
        self.settings = settings or StorageConfig.model_validate({})
        self._anonymous = anonymous
        self._patience_s = self.settings.storage_patience_s
        self._check: Callable[[], None] = lambda: None
        options = file_system_options(self.settings, url, anonymous)
        if "::" in url or "?versionId=" in url:
            raise JobError(f"storage {url!r} cannot be used: file systems would not take its name for one name")
        try:
            self.fs, root = fsspec.core.url_to_fs(url, **options)
        except botocore.exceptions.BotoCoreError as error:
            raise StorageRefused(f"storage {url!r} cannot be used: {one_line(error)}") from error
        except Exception as error:  # each file system has its own, for what lacks a host or a part of its URL
            raise JobError(f"storage {url!r} cannot be used: {one_line(error)}") from error
        self.fs.retries = 1  # s3fs's own, beneath ours
        self.root = root.rstrip("/")
        if not (url.strip() and self.root):
            raise JobError(f"storage {url!r} cannot be used: it names no directory, file or bucket")
        self._store = store_of(self.fs)
        self.is_local = isinstance(self._store, LocalStore)

    def __reduce__(self) -> tuple[Any, ...]:
        return Storage, (self.url, self.settings, self._anonymous)

    def at_first(self) -> "Storage":
        """The same storage for the first contact: one that has never answered is a mistake sooner than an outage."""
        return self.hurried(FIRST_PATIENCE_S)

    def hurried(self, patience_s: float) -> "Storage":
        """The same storage with at most so much patience."""
        patience = {"storage_patience_s": min(self._patience_s, patience_s)}
        return Storage(self.url, self.settings.model_copy(update=patience), self._anonymous).guarded(self._check)

    def guarded(self, check: Callable[[], None]) -> "Storage":
        """The same storage, in this process, whose every try to write or to remove comes after a call of `check`, which
        raises if the output has become another's: tries that storage has to be waited for may be minutes apart.
        """

        def checks(before: Callable[[], None] = self._check) -> None:
            before()
            check()

        guarded = Storage(self.url, self.settings, self._anonymous)
        guarded._check = checks
        return guarded

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
            return patiently(operation, self._patience_s, f"{what} in storage {self.url!r}")
        except (FileNotFoundError, FileExistsError):
            raise
        except NoPutIfAbsent as error:
            raise _without_condition(self.url, str(error)) from error
        except Exception as error:
            if is_transient(error):
                raise StorageGone(
                    f"{what} in storage {self.url!r} has not worked for {self._patience_s:.0f} s "
                    f"({one_line(error)}): what is committed stays, start the job again to resume"
                ) from error
            if not is_storage_error(error):
                raise
            if isinstance(error, NotADirectoryError) and os.path.isfile(self.root):
                raise StorageRefused(f"{self.url!r} is a file: name a directory") from error
            raise StorageRefused(
                f"storage {self.url!r} refuses {what} ({one_line(error)}): check its name, its permissions and the "
                "credentials in the environment, profile or role"
            ) from error

    def info(self, path: str) -> dict[str, Any]:
        """What the file system says of an object, for `stamp`. Raises FileNotFoundError."""
        return self._reading(path, lambda: self._store.info(path))

    def stamps(self, folder: str, suffix: str = "") -> dict[str, str]:
        """Objects in a folder, sorted by name (with the folder); what each stands for changes when the object does."""
        return {name: stamp(info) for name, info in self._objects(folder, suffix).items()}

    def names(self, folder: str, suffix: str = "") -> list[str]:
        """Names (with their folder) of the objects in a folder, sorted; [] if there is no such folder."""
        return list(self._objects(folder, suffix))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of the objects in a folder, or right below the root, by name (with the folder), sorted."""
        return {name.lstrip("/"): info["size"] for name, info in self._objects(folder, "").items()}

    def hidden(self, folder: str, older_than_s: float) -> list[str]:
        """Names (with their folder) of hidden files in a folder on a disk that have not changed for so long, sorted.

        [] on other stores, where nothing stands in its folder before it is whole.
        """
        if not self.is_local:
            return []
        latest = time.time() - older_than_s
        infos = self._infos(folder)
        return [f"{folder}/{name}" for name in sorted(infos) if name.startswith(".") and infos[name]["mtime"] < latest]

    def everything(self, folder: str) -> list[str]:
        """Names (with their folder) of all objects in a folder, at any depth, hidden ones included."""
        path = self.path(folder)
        found = self.attempt("listing", lambda: self.fs.find(path))
        return [self.relative(name) for name in found if name.rstrip("/") != path]  # some stores list the folder itself

    def entries(self) -> list[str]:
        """Names of what lies right below the root, sorted, folders with a "/" behind; [] if there is nothing.

        Hidden ones are left out. Raises JobError if the root is a file.
        """
        try:
            found = self.attempt("listing", lambda: self.fs.ls(self.root, detail=True, refresh=True))
        except FileNotFoundError:
            return []
        if any(info["name"] == self.root and info["type"] != "directory" and info["size"] for info in found):
            raise JobError(f"{self.url!r} is a file: name a directory")
        names = {info["name"].rstrip("/")[len(self.root) + 1 :]: info["type"] == "directory" for info in found}
        return [name + "/" * names[name] for name in sorted(names) if name and not name.startswith(".")]

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        """An object's content, None if there is none. Raises Unfit for what is no file or larger than `limit` bytes."""
        try:
            return self.attempt("reading", lambda: self._store.whole(self.path(name), limit))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object whole, replacing an older one."""
        self._write(lambda: self._store.put(self.path(name), content))

    def write_if_absent(self, name: str, content: bytes) -> bool:
        """Write an object whole unless one of that name exists; whether this call wrote it.

        False may also mean that this call's own write went through and its answer was lost: compare the content.
        """
        return self._write(lambda: self._store.create(self.path(name), content))

    def prove_put_if_absent(self) -> None:
        """Raises StorageRefused where `write_if_absent` replaces what is there, so that two jobs could own one output.

        Two writes of a name that nobody else has, and its removal.
        """
        name = f"_probe-{uuid.uuid4().hex[:12]}.json"
        # Should an answer be lost, the first is tried again and refused, which proves as much.
        proven = not self.write_if_absent(name, b"1") or not self.write_if_absent(name, b"2")
        self.remove([name])
        if not proven:
            raise _without_condition(self.url, "it replaces an object that was to be written only if there is none")

    def remove(self, names: list[str]) -> None:
        """Remove objects, those that are gone already included."""
        for start in range(0, len(names), MOST_REMOVED):
            paths = [self.path(name) for name in names[start : start + MOST_REMOVED]]
            self.attempt("removing", partial(self._guarded, partial(self._store.remove, paths)))

    def open(self, name: str) -> Any:
        """A readable file object."""
        return self.open_path(self.path(name))

    def open_path(self, path: str, stamp: str | None = None) -> Any:
        """A readable file object that fetches just the ranges asked for, each as patiently as any other operation.

        With a stamp, opening and reading raise ObjectChanged if the object is no longer the one that it stands for.
        Where the store cannot say so with every range, `check_unchanged` must, once all is read.
        """
        return _PatientReader(self, path, self._reading(path, lambda: self._store.open(path, stamp)))

    def check_unchanged(self, path: str, wanted: str | None) -> None:
        """Raises ObjectChanged if what was read through an open file may be of another content than `wanted`."""
        if wanted is not None and not self._store.pins(wanted) and stamp(self.info(path)) != wanted:
            raise changed(path)

    def _reading(self, path: str, operation: Callable[[], Result]) -> Result:
        """As `attempt`, of one object. Raises JobError for what stands on a disk's bad sectors: others may not."""
        try:
            return self.attempt(f"reading {path!r}", operation)
        except StorageGone as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno == errno.EIO:
                raise StorageRefused(f"{path!r} cannot be read ({one_line(cause)})") from error
            raise

    def _objects(self, folder: str, suffix: str) -> dict[str, dict[str, Any]]:
        """What the file system says of the objects in a folder, by name, sorted."""
        infos = self._infos(folder)
        # A folder's own marker has no name in it, and hidden ones are scratch files.
        shown = (name for name in sorted(infos) if name[:1] not in ("", ".") and name.endswith(suffix))
        return {f"{folder}/{name}": infos[name] for name in shown}

    def _infos(self, folder: str) -> dict[str, dict[str, Any]]:
        """Likewise with hidden ones, by name within the folder."""
        path = self.path(folder).rstrip("/")
        try:
            found = self.attempt("listing", lambda: self.fs.ls(path, detail=True, refresh=True))
        except FileNotFoundError:
            return {}
        # A folder may be named like an object.
        below = f"{path}/"
        return {i["name"].removeprefix(below): i for i in found if i["type"] != "directory" and below in i["name"]}

    def _guarded(self, operation: Callable[[], Result]) -> Result:
        self._check()
        return operation()

    def _write(self, operation: Callable[[], Result]) -> Result:
        try:
            return self.attempt("writing", partial(self._guarded, operation))
        except (FileNotFoundError, FileExistsError) as error:
            doubt = "is a file where a directory should be" if self.is_local else "is its bucket there"
            raise StorageRefused(f"storage {self.url!r} cannot be written to ({one_line(error)}): {doubt}?") from error


class _PatientReader(AbstractBufferedFile):
    """A file whose reads are tried again where they may be."""

    def __init__(self, storage: Storage, path: str, opened: Opened) -> None:
        super().__init__(storage.fs, path, cache_type="none", size=opened.size)
        self._storage = storage
        self._opened = opened

    def close(self) -> None:
        if not self.closed:
            self._opened.close()
        super().close()

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._storage._reading(self.path, lambda: self._fetch(start, min(end, self.size)))

    def _fetch(self, start: int, end: int) -> bytes:
        content = self._opened.read(start, end)
        if len(content) < end - start:
            raise ConnectionError(f"{end - start} bytes were asked for and {len(content)} came")
        return content


def _without_condition(url: str, why: str) -> StorageRefused:
    return StorageRefused(
        f"storage {url!r} cannot hold an output, for {why}: two jobs could take it, and neither would notice; write to "
        "a store that refuses to replace an object if asked to (S3, Azure, Google Cloud Storage) or to a disk, and copy"
    )
