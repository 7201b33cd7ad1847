"""A lease on an output: while one job holds it, others that would do the same work leave.

Files `_lease/<number>.json`, the highest of which counts. To take the lease is to put the next number if absent, once
the highest has been released or its holder is dead, so one taker wins. The highest is never removed: no number comes
twice.

Whether a holder lives is seen, not believed: who finds the lease held watches it. A holder that renews it meanwhile is
alive, one that does not for LEASE_S by the watcher's own clock is dead; dates play no part.

The lease saves double work and no more: a holder that was paused for longer than LEASE_S may meet its successor. It
then finds out before it next publishes or removes anything (`check`), and what it commits until then is no harm: the
first commit of a unit wins, and units are named by what they are of.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Self

from engine import parse_json
from pipeline.errors import JobError, JobStopped, NothingToDo
from pipeline.storage.ownership import Kind, own, remove
from pipeline.storage.records import SMALL, Count, Record
from pipeline.storage.storage import Storage
from pipeline.storage.stores import Unfit

log = logging.getLogger(__name__)

LEASES = "_lease"
LEASE_S = 120.0  # without a renewal, and the holder is dead
RENEW_S = 20.0
LOOK_S = 5.0  # between two looks of a watcher
SAY_S = 30.0  # between two lines of a watcher's log
HASTE_S = 10.0  # what a renewal or a release waits for the storage: the next one comes soon enough


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, or held it last."""

    host: str
    pid: Count
    id: str
    renewals: Count = 0
    released: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


_RECORD: Record[Holder] = Record(Holder, "wait for it")


class Lease:
    """An output's lease. Entering takes it; until it is left, a thread renews it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._hasty = storage.hurried(HASTE_S)
        self._holder = Holder(socket.gethostname(), os.getpid(), uuid.uuid4().hex)
        self._number = 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self.lost = ""  # once it is another job's: says so

    def __enter__(self) -> Self:
        """Waits for as long as it takes to tell whether a holder lives.

        Raises NothingToDo if another job holds it and was seen alive; JobError if no lease can be written; StorageGone,
        StorageRefused, for a store too that cannot hold a lease.
        """
        self._take(self._storage.at_first())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()  # or it might renew what is released next
        try:
            if not self.lost:
                self._look(self._hasty)
                self._hasty.write(_name(self._number), replace(self._holder, released=True).to_json())
        except (JobError, JobStopped) as refused:
            if not self.lost:
                log.warning(
                    "the lease on %r could not be released (%s): the next job waits for %.0f s, then takes it over",
                    self._storage.url, refused, LEASE_S,
                )  # fmt: skip

    def check(self) -> None:
        """Raises JobStopped if the lease has become another job's; StorageGone, StorageRefused."""
        self._look(self._storage)

    def _take(self, storage: Storage) -> None:
        watch = _Watch(storage.url)
        while True:
            numbers = _numbers(storage)
            newest = max(numbers, default=0)
            record = _read(storage, _name(newest)) if newest else None
            if not watch.is_over(newest, record):
                time.sleep(LOOK_S)
                continue
            if newest == 0:
                storage.prove_put_if_absent()  # once for an output: where there is a lease, it was
            self._number, content = newest + 1, self._holder.to_json()
            name = _name(self._number)
            # Refused, the write may still be this one, its answer lost.
            if not storage.write_if_absent(name, content) and (standing := _read(storage, name)) != content:
                if standing == b"" and self._number not in _numbers(storage):  # where a damaged file would be
                    raise JobError(f"{name} of {storage.url!r} is in the way, for it is no file: remove it")
                continue
            if max(_numbers(storage), default=0) > self._number:
                # Between look and write others took this number, left it, and a later holder removed it.
                remove(storage, Kind.RUN, [name])
                continue
            remove(storage, Kind.RUN, [_name(number) for number in numbers])
            return

    def _keep(self) -> None:
        while not self._left.wait(RENEW_S):
            try:
                self._renew()
            except (JobError, JobStopped) as error:
                if self.lost:
                    return
                log.warning("the lease on %r could not be renewed (%s): trying again", self._storage.url, error)

    def _renew(self) -> None:
        """Looks first: this process may have been asleep for long."""
        storage = self._hasty
        standing = self._look(storage)
        self._holder = replace(self._holder, renewals=self._holder.renewals + 1)
        name, content = _name(self._number), self._holder.to_json()
        if standing is not None:
            storage.write(name, content)
        elif storage.write_if_absent(name, content):  # it was deleted by hand: who comes next must not find nothing
            log.warning("%s of %r was deleted while this job held it: written again", name, storage.url)

    def _look(self, storage: Storage) -> bytes | None:
        """The record of this lease as it stands. Raises JobStopped if another job has it."""
        newest = max(_numbers(storage), default=0)
        record = _read(storage, _name(max(newest, self._number)))
        holder = _holder(record)
        if newest > self._number or (holder is not None and holder.id != self._holder.id):
            self.lost = (
                f"{holder or 'another job'} has taken over output {storage.url!r}, for this job had not renewed its "
                "lease in time: what is committed stays, and that job goes on with it"
            )
        if self.lost:
            raise JobStopped(self.lost)
        return record


class _Watch:
    """What one that would take a lease sees of its holder."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen: tuple[int, bytes | None] | None = None
        self._looked_at = 0.0
        self._said_at = 0.0
        self._silent_s = 0.0

    def is_over(self, number: int, record: bytes | None) -> bool:
        """Whether nobody holds the lease any more, told its newest record. Raises NothingToDo if its holder lives."""
        now, before = time.monotonic(), self._seen
        holder = _holder(record)
        # Time in which nobody could look, this process asleep or the storage away, says nothing about the holder.
        self._silent_s += 0.0 if before is None else min(now - self._looked_at, 2 * LOOK_S)
        self._seen, self._looked_at = (number, record), now
        if number == 0 or (holder is not None and holder.released):
            return True
        who = f"another job ({_name(number)} is damaged)" if holder is None else str(holder)
        if before is not None and before != self._seen:
            raise NothingToDo(f"{who} is doing output {self._url!r}: it was just seen to renew its lease")
        if self._silent_s >= LEASE_S:
            log.warning(
                "%s has not renewed its lease on %r for %.0f s and is taken for dead: this job takes over",
                who, self._url, self._silent_s,
            )  # fmt: skip
            return True
        if before is None or now - self._said_at >= SAY_S:
            self._said_at = now
            log.info(
                "%s holds the lease on %r: if it renews it, which the living do every %.0f s, it is at work and this "
                "job ends; if it has not in %.0f s, this job takes over",
                who, self._url, RENEW_S, LEASE_S - self._silent_s,
            )  # fmt: skip
        return False


def _numbers(storage: Storage) -> list[int]:
    return [int(PurePath(name).stem) for name in own(Kind.RUN, storage.names(LEASES, ".json"))]


def _read(storage: Storage, name: str) -> bytes | None:
    """A lease's record, b"" for one that cannot be a lease's."""
    try:
        return storage.read(name, SMALL)
    except Unfit:
        return b""


def _holder(record: bytes | None) -> Holder | None:
    """None for no record, and for one that is damaged."""
    try:
        return _RECORD.checked(parse_json(record or b""))
    except ValueError:
        return None


def _name(number: int) -> str:
    return f"{LEASES}/{number:09d}.json"
