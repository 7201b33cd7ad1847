"""A lease on an output: while one job holds it, others that would do the same work leave.

Files `_lease/<number>.json`, the highest of which counts. To take the lease is to put the next number if absent, once
the highest has been released or has expired, so one taker wins. The highest is never removed: no number comes twice.

The lease saves double work and no more: a holder that was paused for longer than LEASE_S may meet its successor, and
exactly-once rests on the commit protocol then as ever.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import TracebackType

from pipeline.errors import JobError, JobStopped, NothingToDo
from pipeline.storage import Storage

log = logging.getLogger(__name__)

LEASES = "_lease"
# The clocks of two hosts may differ by LEASE_S - 2 * RENEW_S, 3 minutes, even where one renewal failed: a taker whose
# clock is ahead by less sees no living lease as expired; one whose clock is behind waits that longer for a dead job's.
LEASE_S = 300.0
RENEW_S = 60.0
HASTE_S = 10.0  # what a renewal or a release waits for the storage: the next one, or the expiry, comes soon enough


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, and until when."""

    host: str
    pid: int
    id: str
    expires: datetime | None = None  # None: released

    @property
    def is_over(self) -> bool:
        return self.expires is None or self.expires <= datetime.now(UTC)

    def to_json(self) -> bytes:
        expires_at = self.expires.isoformat(" ", "seconds") if self.expires else None
        return json.dumps({"host": self.host, "pid": self.pid, "id": self.id, "expires_at": expires_at}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Holder:
        """Raises ValueError, TypeError, KeyError."""
        data = json.loads(content)
        expires = datetime.fromisoformat(data["expires_at"]).astimezone(UTC) if data["expires_at"] else None
        return cls(data["host"], data["pid"], data["id"], expires)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lease:
    """An output's lease. Entering takes it; until it is left, a thread renews it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        haste = min(storage.settings.patience_s, HASTE_S)
        self._hasty = Storage(storage.url, replace(storage.settings, patience_s=haste))
        self._holder = Holder(socket.gethostname(), os.getpid(), uuid.uuid4().hex)
        self._number = 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self.lost = ""  # once it is another job's: says so

    def __enter__(self) -> Lease:
        """Raises NothingToDo if another job holds it; StorageGone, StorageRefused."""
        self._take(self._storage.at_first())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()  # or it might renew what is released next
        if self.lost:
            return
        try:
            self._hasty.write(_name(self._number), self._holder.to_json())
        except (JobError, JobStopped) as refused:
            log.warning("the lease on %r could not be released (%s): it expires by itself", self._storage.url, refused)

    def check(self) -> None:
        """Raises JobStopped if the lease has become another job's; StorageGone, StorageRefused."""
        self._look(self._storage)

    def _take(self, storage: Storage) -> None:
        while True:
            numbers = _numbers(storage)
            newest = max(numbers, default=0)
            holder = _read(storage, newest)
            if holder is not None and not holder.is_over:
                raise NothingToDo(f"{holder} is doing output {storage.url!r}, on a lease until {holder.expires}")
            self._number, content = newest + 1, self._renewed()
            name = _name(self._number)
            # Refused, the write may still be this one, its answer lost.
            if not storage.write_if_absent(name, content) and storage.read(name) != content:
                continue
            if max(_numbers(storage), default=0) > self._number:
                # Between look and write others took this number, left it, and a later holder removed it.
                storage.remove([name])
                continue
            storage.remove([_name(number) for number in numbers])
            return

    def _keep(self) -> None:
        while not self._left.wait(RENEW_S):
            try:
                self._hasty.write(_name(self._number), self._renewed())
                self._look(self._hasty)
            except (JobError, JobStopped) as error:
                if self.lost:
                    return
                log.warning("the lease on %r could not be renewed (%s): trying again", self._storage.url, error)

    def _look(self, storage: Storage) -> None:
        newest = max(_numbers(storage), default=0)
        if newest > self._number:
            self.lost = (
                f"{_read(storage, newest) or 'another job'} has taken over output {storage.url!r}, for this job had "
                "not renewed its lease in time: what is committed stays, and that job goes on with it"
            )
        if self.lost:
            raise JobStopped(self.lost)

    def _renewed(self) -> bytes:
        return replace(self._holder, expires=datetime.now(UTC) + timedelta(seconds=LEASE_S)).to_json()


def _numbers(storage: Storage) -> list[int]:
    stems = (name.removeprefix(f"{LEASES}/").removesuffix(".json") for name in storage.names(LEASES, ".json"))
    return [int(stem) for stem in stems if stem.isdecimal()]


def _read(storage: Storage, number: int) -> Holder | None:
    """None if the file is gone, or is no lease: then nobody holds by it."""
    try:
        return Holder.from_json(storage.read(_name(number)) or b"")
    except (ValueError, TypeError, KeyError):
        return None


def _name(number: int) -> str:
    return f"{LEASES}/{number:09d}.json"
