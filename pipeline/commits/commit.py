"""The commit log: a work unit's file exists once its commit record does, and the first record wins."""

import gzip
import hashlib
import io
import json
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import StringConstraints

from engine import parse_json
from pipeline.commits.flop_sums import FlopSums
from pipeline.errors import JobError, one_line
from pipeline.redaction import redacted
from pipeline.rows.unit import WorkUnit
from pipeline.storage.ownership import Kind, own, remove, unfinished
from pipeline.storage.records import SMALL, Amount, Count, DataFile, Flops, Record, RecordDamaged, UnitName
from pipeline.storage.storage import Storage
from pipeline.storage.stores import Unfit
from pipeline.values.row_groups import to_parquet

DATA, COMMITS, SUCCESS_FILE = "data", "_commits", "_SUCCESS.json"
SNAPSHOT_FILE = "_snapshot.json.gz"  # commit records once more, in one object
SNAPSHOT_EVERY = 5_000  # commits
MOST_SNAPSHOT = 2**28  # bytes, compressed
LISTING_THREADS = 32


@dataclass(frozen=True, slots=True)
class Totals(FlopSums):
    """Sums over rows. FLOPs as in the ledger; padding is what was computed for nobody."""

    rows: Count = 0
    errors: Count = 0
    truncated: Count = 0
    stopped: Count = 0  # generations that ended by themselves
    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    flops_prompt: Flops = 0
    flops_decode: Flops = 0
    flops_decode_full_depth: Flops = 0
    flops_full_depth: Flops = 0
    flops_prefix: Flops = 0  # of the tokens that all prompts begin with, once per replica; in none of the above
    flops_padding: Flops = 0
    active_layers: Amount = 0.0  # mean active layers x generated tokens
    seconds: Amount = 0.0  # of generation and audits, summed over replicas
    gpu_seconds: Amount = 0.0  # of replicas with GPUs, times these
    gpuless_seconds: Amount = 0.0  # of replicas without
    joules: Amount = 0.0  # of replicas' GPUs in that time; 0 where nothing counts them
    audited: Count = 0  # rows generated at full depth too
    audit_rouge: Amount = 0.0  # ROUGE-L of their outputs to full depth's, summed
    audit_rouge_squares: Amount = 0.0
    audit_agreeing: Count = 0  # steps of their full-depth answers where the schedule's likeliest token is the same
    audit_steps: Count = 0  # all of these
    # Of the audited rows' answers and, "full", of full depth's own:
    audit_nll: Amount = 0.0  # negative log-likelihood under full depth, nats
    audit_full_nll: Amount = 0.0
    audit_tokens: Count = 0
    audit_full_tokens: Count = 0
    audit_repetition: Amount = 0.0  # repetition of each, summed
    audit_full_repetition: Amount = 0.0
    audit_unsupported: Count = 0  # numbers and names that its prompt does not hold
    audit_full_unsupported: Count = 0
    flops_audit: Flops = 0  # what the audit cost, beside all other FLOPs

    def __post_init__(self) -> None:
        if not self.gpu_seconds + self.gpuless_seconds:  # of one unit
            object.__setattr__(self, "gpuless_seconds", self.seconds)

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    @property
    def audited_speedup(self) -> float:
        """Full-depth FLOPs of whole samples / theirs and the audits', of which full depth needs none."""
        spent = self.flops + self.flops_audit
        return self.flops_full_depth / spent if spent else 1.0

    @property
    def flops_spent(self) -> int:
        """All that was computed: padding and audits cost what output costs."""
        return self.flops + self.flops_prefix + self.flops_padding + self.flops_audit

    @property
    def mean_active_layers(self) -> float:
        return self.active_layers / self.generated_tokens if self.generated_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed work unit."""

    unit: UnitName
    attempt: str
    file: DataFile  # below the output
    checksum: str
    size: Count  # in bytes
    path: str  # of the input file
    start: Count
    run: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{0,200}\z")] = ""  # its claim on the output
    totals: Totals = field(default_factory=Totals)

    @property
    def place(self) -> tuple[str, str, int]:
        """Sorts commits as their rows lie in the input; two files may have had one name, one after the other."""
        return self.path, self.unit.partition("-")[0], self.start

    def to_json(self) -> bytes:
        """Raises ValueError for a total that is no finite number: nobody could read it back."""
        return json.dumps(asdict(self), indent=1, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class _Copy:
    """A commit in a snapshot."""

    name: str  # of its record
    stamp: str
    commit: Commit


_COMMIT: Record[Commit] = Record(Commit, "delete it, and its unit is done again if its input file is there")
_COPY: Record[_Copy] = Record(_Copy, "delete it")


def total(commits: Iterable[Commit]) -> Totals:
    """Sums over commits."""
    return sum((commit.totals for commit in commits), Totals())


def commit_unit(
    storage: Storage, unit: WorkUnit, output: pa.Table, run: str = "", cost: Mapping[str, Any] | None = None
) -> Commit:
    """Write a unit's rows and commit them; `cost` holds the totals that the rows don't tell.

    Returns the commit that holds: another attempt's, if that came first.

    Raises JobError if the commit that holds is another run's; StorageGone, StorageRefused; ValueError for a cost that
    is no finite number.
    """
    content = to_parquet(output)
    attempt = uuid.uuid4().hex[:12]
    commit = Commit(
        unit=unit.id,
        attempt=attempt,
        file=f"{DATA}/{unit.id}-{attempt}.parquet",
        checksum=checksum(content),
        size=len(content),
        path=redacted(unit.path),
        start=unit.start,
        run=run,
        totals=replace(_totals(output), **(cost or {})),
    )
    name, record = _record_name(unit.id), commit.to_json()
    storage.write(commit.file, content)
    if storage.write_if_absent(name, record):
        return commit
    # The record may be this attempt's own, its answer lost: then it names this attempt.
    if (held := _read_commit(storage, name)) is None:
        raise _vanished(storage, name)
    if held.run != run:
        raise _foreign(storage, held, run)
    return held


def checksum(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def read_commits(storage: Storage, run: str | None = None, keep: bool = False) -> list[Commit]:
    """All commits of an output, by unit. Raises JobError if one is by another run than `run`, or is no commit.

    Those that a snapshot holds unchanged are not read again; with `keep`, when many were, a new one is written.
    """
    stamps = storage.stamps(COMMITS, ".json")
    held = _read_snapshot(storage, stamps)
    names = [name for name in stamps if name not in held]
    with ThreadPoolExecutor(LISTING_THREADS) as pool:
        found = dict(zip(names, pool.map(lambda name: _read_commit(storage, name), names), strict=True))
    absent = [name for name, commit in found.items() if commit is None]
    # A nightly job takes out those of versions that were replaced: they are listed no more.
    if absent and (still := sorted({*absent} & storage.stamps(COMMITS, ".json").keys())):
        raise _vanished(storage, still[0])
    commits = [commit for name in stamps if (commit := held.get(name) or found[name]) is not None]
    for commit in commits:
        if run is not None and commit.run != run:
            raise _foreign(storage, commit, run)
    if keep and len(names) >= SNAPSHOT_EVERY:
        write_snapshot(storage, commits, stamps)
    return commits


def write_snapshot(storage: Storage, commits: Iterable[Commit], stamps: Mapping[str, str] | None = None) -> None:
    """Let the next session read these commits at once: one by one, 100,000 take minutes on object storage.

    `stamps` are those that the commits were read under, by default today's.
    """
    stamps = storage.stamps(COMMITS, ".json") if stamps is None else stamps
    named = ((_record_name(commit.unit), commit) for commit in commits)
    # A line each, for they are read one by one: what is in the file then takes no memory but what is taken from it.
    lines = (json.dumps(asdict(_Copy(name, stamps[name], commit))) for name, commit in named if name in stamps)
    storage.write(SNAPSHOT_FILE, gzip.compress("\n".join(lines).encode(), compresslevel=1))


def _read_snapshot(storage: Storage, stamps: Mapping[str, str]) -> dict[str, Commit]:
    """Those of its copies that the records themselves still bear out, by name of the record.

    None of a snapshot that is not there or not sound to its end, where its check sum is: the records themselves count.
    """
    held: dict[str, Commit] = {}
    try:
        content = storage.read(SNAPSHOT_FILE, MOST_SNAPSHOT)
        with gzip.open(io.BytesIO(content or b"")) as lines:
            # Not much more than there can be of use, for gzip makes gigabytes of little.
            for _ in range(2 * len(stamps) + SNAPSHOT_EVERY):
                if not (line := lines.readline(SMALL)):
                    return held
                copy = _COPY.checked(parse_json(line))
                if stamps.get(copy.name) == copy.stamp and _is_of(copy.name, copy.commit):
                    held[copy.name] = copy.commit
    except (Unfit, OSError, EOFError, zlib.error, ValueError):
        pass
    return {}


def _record_name(unit: str) -> str:
    return f"{COMMITS}/{unit}.json"


def _read_commit(storage: Storage, name: str) -> Commit | None:
    commit = _COMMIT.read(storage, name)
    if commit is not None and not _is_of(name, commit):
        raise _COMMIT.damaged(storage, name, f"it is of unit {commit.unit} and names {commit.file}")
    return commit


def _vanished(storage: Storage, name: str) -> JobError:
    return JobError(f"{name} of {storage.url!r} was just seen, yet is not there: who deletes it?")


def damaged(storage: Storage, commit: Commit, why: str) -> RecordDamaged:
    """What is to be said of a commit's record that is not as it should be."""
    return _COMMIT.damaged(storage, _record_name(commit.unit), why)


@contextmanager
def open_rows(storage: Storage, commit: Commit) -> Iterator[Any]:
    """A commit's open data file. Raises JobError where it, or what is read of it meanwhile, is damaged."""
    try:
        with storage.open(commit.file) as stream:
            yield stream
    except (OSError, pa.ArrowException) as error:
        raise damaged(storage, commit, f"{commit.file} cannot be read: {one_line(error)}") from error


def _is_of(name: str, commit: Commit) -> bool:
    """Whether a record and its unit and file are named alike."""
    return name == _record_name(commit.unit) and commit.file.startswith(f"{DATA}/{commit.unit}-")


def _foreign(storage: Storage, commit: Commit, run: str) -> JobError:
    return JobError(
        f"the commit of unit {commit.unit} in {storage.url!r} is by run {commit.run}, this is {run}: a process of "
        "that run still wrote here; end it, then start this job with --fresh"
    )


def sweep_orphans(storage: Storage, commits: Collection[Commit], is_over: Callable[[str], bool] | None = None) -> int:
    """Remove data files of ours that no commit names: what attempts left that died, also while they wrote it, or came
    second. Returns how many. `storage` is guarded: the output may have become another's by the time they are found.

    With `is_over`, only those of units that are committed, so that no other attempt can be any more, and those of which
    it says that they never will be.
    """
    committed, units = {commit.file for commit in commits}, {commit.unit for commit in commits}
    orphans = [name for name in own(Kind.RUN, storage.names(DATA)) if name not in committed]
    if is_over is not None:
        named = ((name, name.removeprefix(f"{DATA}/").rpartition("-")[0]) for name in orphans)
        orphans = [name for name, unit in named if unit in units or is_over(unit)]
    orphans += unfinished(storage)
    remove(storage, Kind.RUN, orphans)
    return len(orphans)


def _totals(output: pa.Table) -> Totals:
    def count(name: str, value: object) -> int:
        return int(pc.sum(pc.equal(output[name], value)).as_py() or 0)

    weighted = pc.multiply(output["mean_active_layers"].cast(pa.float64()), output["generated_tokens"])
    return Totals(
        rows=output.num_rows,
        errors=count("finish_reason", "error"),
        truncated=count("prompt_truncated", True),
        stopped=count("finish_reason", "stop"),
        active_layers=float(pc.sum(weighted).as_py() or 0.0),
        # In Python's integers: those of Arrow wrap where many long prompts of a large model are summed.
        **{name: sum(output[name].drop_null().to_pylist()) for name in _SUMMED},
    )


_SUMMED = (
    "prompt_tokens", "generated_tokens", "flops_prompt", "flops_decode", "flops_decode_full_depth", "flops_full_depth"
)  # fmt: skip
