"""Which files an input names: a file, a directory or a glob, as a shell user would expect."""

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from fsspec.utils import glob_translate

from pipeline.errors import JobError, NoFiles, one_line
from pipeline.storage.patterns import fixed_part, without_braces
from pipeline.storage.storage import Storage

log = logging.getLogger(__name__)

ENDINGS = (".parquet", ".parq", ".pq")  # of files below a directory, in any case

HIDDEN = 'names that begin with "_" or "."'
OTHER = "files that do not end in .parquet, .parq or .pq"
TWICE = "names that links reach again"
NOTHING = "patterns that match nothing"


def find_input_files(storage: Storage) -> list[str]:
    """Paths of the input's Parquet files, sorted, each file once. What is left out is said in one line of the log.

    A path that exists is that file or directory, whatever characters are in it; else it is a glob: `*`, `?`, `[ab]`,
    `{a,b}`, and `**` for any depth. Links are followed. A named file is always taken; of what a directory or a glob
    reaches, names that begin with "_" or "." are tools', unless the pattern itself begins so, and files with other
    endings are left out unless a glob matches no others.

    Raises JobError: nothing is found, or a directory cannot be listed. StorageGone.
    """
    listing = _Listing(storage)
    try:
        found = set(storage.attempt("listing", listing.named))
    except (OSError, ValueError, re.error) as error:
        raise JobError(f"input {storage.url!r} cannot be listed: {one_line(error)}") from error
    paths = listing.once(found)
    listing.say()
    if not paths:
        absent = storage.is_local and fixed_part(storage.root) == storage.root and not os.path.lexists(storage.root)
        why = "does not exist" if absent else "holds no Parquet files"
        raise NoFiles(f"input {storage.url!r} {why}: name a .parquet file, its directory or a glob")
    return paths


class _Listing:
    """Of one input; collects what it leaves out."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._left_out: dict[str, set[str]] = {}  # by reason

    def say(self) -> None:
        if self._left_out:
            parts = [f"{len(names)} {reason} (such as {min(names)!r})" for reason, names in self._left_out.items()]
            log.info("input %r: left out %s", self._storage.url, ", ".join(parts))

    def named(self) -> list[str]:
        """Files that the input names, some maybe more than once."""
        root = self._storage.root
        kind = self._kind(root)
        if kind in ("file", "other"):
            return [root]
        if kind == "directory" or fixed_part(root) == root:
            return list(self._below(root))
        found: list[str] = []
        for pattern in without_braces(root):
            kind = self._kind(pattern) if pattern != root else ""
            if kind == "directory":
                matched = list(self._below(pattern))
            else:
                matched = [pattern] if kind else list(self._matched(pattern))
            if not matched:
                self._leave_out(NOTHING, pattern)
            found += matched
        return found

    def once(self, paths: set[str]) -> list[str]:
        """Sorted, and each file under one of its names: one that is no link if it is there, else the first."""
        if not self._storage.is_local:
            return sorted(paths)
        names: dict[str, str] = {}
        for path in sorted(paths, key=lambda path: (os.path.realpath(path) != path, path)):
            if names.setdefault(os.path.realpath(path), path) != path:
                self._leave_out(TWICE, path)
        return sorted(names.values())

    def _leave_out(self, reason: str, name: str) -> None:
        self._left_out.setdefault(reason, set()).add(name)

    def _kind(self, path: str) -> str:
        """What the file system calls what is there, such as "file" or "directory"; "" if there is nothing."""
        try:
            return str(self._storage.fs.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def _matched(self, pattern: str) -> Iterator[str]:
        """Files that a pattern without braces matches, and those in directories that it matches."""
        if self._storage.is_local:
            found = dict(_expand("", pattern.split("/")[1:], partial(self._leave_out, TWICE)))
        else:
            infos = self._storage.fs.glob(self._escaped(pattern), detail=True)
            found = {path.rstrip("/"): info["type"] == "directory" for path, info in infos.items()}
        files: list[str] = []
        taken: list[str] = []
        for path, is_directory in found.items():
            if not _is_asked_for(pattern, path):
                self._leave_out(HIDDEN, path)
            elif not is_directory:
                files.append(path)
            elif not pattern.endswith("**"):  # which has matched what is in it too
                taken += self._below(path)
        taken += [path for path in files if path.lower().endswith(ENDINGS)]
        taken = taken or files
        for path in set(files).difference(taken):
            self._leave_out(OTHER, path)
        yield from taken

    def _below(self, folder: str) -> Iterator[str]:
        """Parquet files in a directory, at any depth."""
        if not self._storage.is_local:
            found = self._storage.fs.find(folder)
        elif os.path.isdir(folder):
            again = partial(self._leave_out, TWICE)
            found = [path for path, is_directory in _walk(folder, again) if not is_directory or _is_hidden(path)]
        else:
            found = []
        for path in found:
            parts = path[len(folder) :].strip("/").split("/")
            hidden = next((place for place, part in enumerate(parts) if _is_hidden(part)), None)
            if hidden is not None:
                self._leave_out(HIDDEN, "/".join([folder, *parts[: hidden + 1]]))
            elif path.lower().endswith(ENDINGS):
                yield path
            else:
                self._leave_out(OTHER, path)

    def _escaped(self, pattern: str) -> str:
        """A pattern in which directories are named that exist with brackets in them."""
        named = pattern.split("/")
        parts = list(named)
        for place, part in enumerate(named[:-1]):
            if re.search(r"[*?]", part) or ("[" in part and not self._kind("/".join(named[: place + 1]))):
                break
            parts[place] = part.replace("[", "[[]")
        return "/".join(parts)


def _is_asked_for(pattern: str, path: str) -> bool:
    """Whether no part of a matched path is hidden, but for those that the pattern names with their first character."""
    parts, wanted = path.split("/"), pattern.split("/")
    if "**" in wanted:
        # Before the first ** and after the last, parts stand opposite each other; between is any directory.
        first, last = wanted.index("**"), len(wanted) - wanted[::-1].index("**")
        between = len(parts) - first - len(wanted[last:])
        wanted = [*wanted[:first], *["**"] * between, *wanted[last:]]
    return all(not _is_hidden(part) or want[:1] == part[:1] for part, want in zip(parts, wanted, strict=False))


def _is_hidden(path: str) -> bool:
    return path.rpartition("/")[2][:1] in ("_", ".")


def _expand(folder: str, parts: list[str], again: Callable[[str], None]) -> Iterator[tuple[str, bool]]:
    """(path, whether it is a directory) of all below `folder` that matches the parts of a pattern, hidden names too."""
    part, rest = parts[0], parts[1:]
    path = f"{folder}/{part}"
    if part == "**":
        below = [(folder, True), *_walk(folder or "/", again)]
        matches = below if rest else below[1:]
    elif os.path.lexists(path):
        matches = [(path, os.path.isdir(path))]
    else:
        wanted = re.compile(glob_translate(part))
        with os.scandir(folder or "/") as entries:
            found = sorted((entry.name, _is_directory(entry)) for entry in entries if wanted.match(entry.name))
        matches = [(f"{folder}/{name}", is_directory) for name, is_directory in found]
    for path, is_directory in matches:
        if not rest:
            yield path, is_directory
        elif is_directory:
            yield from _expand(path, rest, again)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that goes round in a circle, or is closed
        return False


def _walk(folder: str, again: Callable[[str], None]) -> Iterator[tuple[str, bool]]:
    """(path, whether it is a directory) of all below a local directory, but for what lies in hidden directories.

    Each directory is entered once, under the name that goes through the fewest links; links to those are told `again`.
    """
    base = os.path.realpath(folder)
    entered: set[str] = set()
    waiting = deque([folder])
    while waiting:
        here = waiting.popleft()
        real = os.path.realpath(here)
        if real in entered or (real != base and f"{base}/".startswith(f"{real.rstrip('/')}/")):
            again(here)
            continue
        entered.add(real)
        if here != folder:
            yield here, True
        with os.scandir(here) as entries:
            found = sorted((entry.name, _is_directory(entry), entry.is_symlink()) for entry in entries)
        for name, is_directory, is_link in found:
            path = f"{here.rstrip('/')}/{name}"
            if not is_directory or _is_hidden(name):
                yield path, is_directory
            else:
                (waiting.append if is_link else waiting.appendleft)(path)
