"""What of an output is ours. Nothing else is removed or written over, and nothing but this module removes.

An output is ours if it holds nothing, or a run of ours; in one that is ours, files are ours that are named as we name
them. Whatever else lies there stays as it is.
"""

import errno
import fcntl
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from engine import parse_json
from pipeline.errors import JobError
from pipeline.storage.patterns import fixed_part, without_braces

if TYPE_CHECKING:  # benchmarks claim their directories on machines without what storages need
    from pipeline.storage.storage import Storage

CLAIM_FILE = "_job.json"
# In runs of an earlier version each sample of rows has units of its own, whose names end with it.
_UNIT = r"([0-9a-f]{32}|[0-9]{5,})-[0-9]{9,}(-[0-9]{3,})?"
_DATA = rf"{_UNIT}-[0-9a-f]{{12}}\.parquet"
_RUN_FILE = "_run.json"
_RUN_FOLDERS = ("_commits", "_failed", "data", "_input")  # commits before the data they name
_UNFINISHED = re.compile(rf"(data/\.{_DATA}|(_commits|_failed)/\.{_UNIT}\.json|_input/\.[0-9]+\.json)\.[0-9a-f]{{32}}")
DEAD_S = 3600.0  # since the last byte of an unfinished file was written: no write takes so long
_WAY_OUT = "name a new or an empty directory; nothing was written or removed there"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a path of pathlib's has one slash of the two
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)  # said by some network disks
_claimed: dict[tuple[int, int], IO[bytes]] = {}  # claim files that this process holds locked until it ends, by inode


class Kind(Enum):
    """What an output is: which names are its own, what in it shows that it is ours, what may be there before that, and
    names of data files as it writes them.
    """

    RUN = (
        rf"_run\.json|_SUCCESS\.json|_snapshot\.json\.gz|_inputs\.json|_plan\.json|report\.html|_input/[0-9]+\.json|"
        rf"(_commits|_failed)/{_UNIT}\.json|_lease/[0-9]{{9}}\.json|data/({_DATA}|\.{_DATA}\.[0-9a-f]{{32}})",
        (_RUN_FILE,),
        r"_lease/|_plan\.json|_probe-[0-9a-f]{12}\.json",
        ("data/rows.parquet", "data/00000-000000000-0123456789ab.parquet"),
    )
    DATA_SET = (
        r"_DATASET\.json|_?README\.md|data/train-[0-9]{5,}\.parquet|data/\.train-[0-9]{5,}\.parquet\.[0-9a-f]{32}|"
        r"(output|errors)\.jsonl|_requests/[0-9a-f]{16}\.parquet",
        ("_DATASET.json", f"_generation/{_RUN_FILE}"),
        r"_generation/|_requests/",
        ("data/rows.parquet", "data/train-00000.parquet"),
    )

    def __init__(self, names: str, marks: tuple[str, ...], before: str, data: tuple[str, ...]) -> None:
        self.names = re.compile(names)
        self.marks = marks
        self.before = re.compile(before)
        self.data = data


def check_place(output: "Storage", kind: Kind, source: "Storage | None" = None) -> None:
    """Refuse an output in which a job would meet files that are not its own, before anything is written to it.

    Raises JobError if the output is a file, holds files and no run of ours, or overlaps the job's input, `source`;
    StorageGone, StorageRefused.
    """
    if source is not None and type(output.fs) is type(source.fs):
        base = _real(output.root, output.is_local)
        if any(_reads(source.root, base, name, source.is_local) for name in kind.data):
            raise _overlaps(output.url, source.url)
    entries = output.entries()
    for mark in kind.marks:
        folder = mark.rpartition("/")[0]
        if mark in (output.names(folder) if folder else entries) and not _is_anothers(output, mark):
            return
    strangers = [name for name in entries if not kind.before.fullmatch(name)]
    # A --fresh that was killed may have left folders on a disk, with nothing in them or what a writer died over.
    _refuse_strangers([name for name in strangers if not _is_left_over(output, name)], output.url)


def check_files(output: "Storage", source: "Storage", paths: Iterable[str]) -> None:
    """Raises JobError if one of the input's files lies in the output, by whatever links it is reached."""
    if type(output.fs) is not type(source.fs):
        return
    base = _real(output.root, output.is_local)
    inside = next((path for path in paths if _is_below(_real(path, output.is_local), base)), None)
    if inside is not None:
        raise JobError(
            f"input file {inside!r} lies in output {output.url!r}: name an output that lies elsewhere, or an input "
            "that leaves the file out"
        )


def own(kind: Kind, names: Iterable[str]) -> list[str]:
    """Those of the names below an output that are its own."""
    return [name for name in names if kind.names.fullmatch(name)]


def remove(storage: "Storage", kind: Kind, names: Collection[str]) -> None:
    """Remove objects of an output, those that are gone already included.

    Raises ValueError for a name that is not the output's own, which is a defect; StorageGone, StorageRefused.
    """
    foreign = set(names).difference(own(kind, names))
    if foreign:
        raise ValueError(f"{min(foreign)!r} is no name of ours: it is not removed")
    storage.remove(list(names))


def discard_run(storage: "Storage") -> None:
    """Remove whatever run an output holds, so that dying on the way leaves nothing that looks committed."""
    remove(storage, Kind.RUN, ["_SUCCESS.json", "_snapshot.json.gz"])
    for folder in _RUN_FOLDERS:
        remove(storage, Kind.RUN, own(Kind.RUN, storage.names(folder)))
    remove(storage, Kind.RUN, unfinished(storage))
    remove(storage, Kind.RUN, ["report.html", "_inputs.json", _RUN_FILE])


def unfinished(storage: "Storage", kind: Kind = Kind.RUN) -> list[str]:
    """Data files that writers on a disk began and did not live to finish."""
    return own(kind, storage.hidden("data", DEAD_S))


def claim_directory(
    path: str | Path, job: str, inputs: Iterable[str | Path] = (), sources: Iterable[str | Path] = ()
) -> Path:
    """Make a local directory a program's own, now or in an earlier call: only then it writes there.

    The directory must neither hold nor lie in `inputs`, corpora that the job reads, nor hold `sources`, what else it
    reads. Until this process ends no other one can claim it.

    Raises JobError if the directory is on no local disk, holds what the job did not write, overlaps an input, cannot be
    written, or another process is at work on it.
    """
    directory, output = Path(path), str(path)
    if _URL.match(output):
        raise JobError(f"output {output!r} is a URL: {job} writes to a local directory; name one, and copy it then")
    claim = json.dumps({"format": 1, "job": job}).encode()
    try:
        for source in filter(_is_local, map(str, inputs)):
            root = LocalFileSystem._strip_protocol(source)
            if any(_reads(root, _real(output, True), name, True) for name in ("rows.parquet", "work/rows.parquet")):
                raise _overlaps(output, source)
        for source in filter(_is_local, map(str, sources)):
            if _is_below(_real(source, True), _real(output, True)):
                raise JobError(f"output {output!r} holds {source!r}, which the job reads: name another output")
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / CLAIM_FILE
        begun = file.is_file() and not file.is_symlink() and not file.stat().st_size  # on a disk that was full
        if begun or not file.is_file():
            names = {entry.name + "/" * entry.is_dir() for entry in directory.iterdir()} - {CLAIM_FILE * begun}
            _refuse_strangers([name for name in names if not name.startswith(".")], output)
            with file.open("r+b" if begun else "xb") as stream:
                stream.write(claim)
        elif file.stat().st_size != len(claim) or file.read_bytes() != claim:
            raise JobError(f"output {output!r} was not written by {job}, as its {CLAIM_FILE} shows: {_WAY_OUT}")
        _hold(file, output)
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        raise JobError(f"output {output!r} cannot be written: {error}") from error
    return directory


def claimed_at(directory: str | Path) -> datetime:
    """When `claim_directory` first made it a program's own: today, to chat templates that write the date, in all calls
    that go on there.
    """
    return datetime.fromtimestamp((Path(directory) / CLAIM_FILE).stat().st_mtime)


def _hold(file: Path, output: str) -> None:
    """Lock a claim until this process ends. Raises OSError; JobError if another process has it."""
    stream = file.open("r+b")  # network disks lock nothing that is open for reading alone
    status = os.fstat(stream.fileno())
    if (key := (status.st_dev, status.st_ino)) in _claimed:
        stream.close()
        return
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise JobError(
            f"another process is at work on output {output!r}: wait until it ends, or name another output"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            stream.close()
            raise
    _claimed[key] = stream


def _is_anothers(output: "Storage", mark: str) -> bool:
    """Whether what is named as a run's record is JSON of another program's; what is damaged may be ours."""
    from pipeline.storage.records import LARGE  # which need what storages do
    from pipeline.storage.stores import Unfit

    if not mark.endswith(_RUN_FILE):
        return False
    try:
        record = parse_json(output.read(mark, LARGE) or b"")
    except (Unfit, ValueError):
        return False
    return isinstance(record, dict) and "fingerprint" not in record


def _is_left_over(output: "Storage", name: str) -> bool:
    """Whether an entry is a folder of a run with nothing in it, or nothing but unfinished files."""
    folder, slash, _ = name.partition("/")
    return slash != "" and folder in _RUN_FOLDERS and all(map(_UNFINISHED.fullmatch, output.everything(folder)))


def _refuse_strangers(names: list[str], url: str) -> None:
    if names:
        many = f", {len(names)} in all" if len(names) > 1 else ""
        raise JobError(f"output {url!r} holds what this job did not write ({min(names)!r}{many}): {_WAY_OUT}")


def _overlaps(output: str, source: str) -> JobError:
    return JobError(
        f"output {output!r} overlaps input {source!r}: a job would read what it writes, or write over what it reads; "
        "name an output that lies elsewhere"
    )


def _reads(root: str, base: str, name: str, is_local: bool) -> bool:
    """Whether an input names files in an output at `base`, or would once that holds a file of this name."""
    written = f"{base}/{name}"
    for pattern in {root, *without_braces(root)}:
        fixed = fixed_part(pattern)
        real = _real(fixed, is_local)
        # A name with brackets in it may be that name.
        if _is_below(real, base) or _is_below(_real(pattern, is_local), base):
            return True
        if _takes(_real(pattern, is_local), written):
            return True
        if fixed != pattern and any(_takes(path, written) for path in _matches(real + pattern[len(fixed) :], written)):
            return True
    return False


def _matches(pattern: str, path: str) -> Iterator[str]:
    """The path and those of its directories that a glob matches."""
    wanted = re.compile(glob_translate(pattern))
    parts = path.split("/")
    return (each for end in range(1, len(parts) + 1) if wanted.fullmatch(each := "/".join(parts[:end])))


def _takes(root: str, path: str) -> bool:
    """Whether an input that is this file or directory takes a file: it leaves hidden names below it out."""
    parts = path[len(root) :].strip("/").split("/")
    return _is_below(path, root) and not any(part[:1] in ("_", ".") for part in parts if part)


def _is_below(path: str, base: str) -> bool:
    return path == base or path.startswith(f"{base.rstrip('/')}/")


def _real(path: str, is_local: bool) -> str:
    return os.path.realpath(path) if is_local else path


def _is_local(path: str) -> bool:
    return "://" not in path or path.startswith(("file://", "local://"))
