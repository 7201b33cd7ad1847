"""The lease on an output: one holder at a time, given up at every end, taken over when its holder is dead."""

from __future__ import annotations

import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from servers import BUCKET, S3Server, wait_until

from pipeline import lease as leases
from pipeline.errors import JobStopped, NothingToDo
from pipeline.lease import Holder, Lease
from pipeline.storage import Storage, StorageGone


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "out"))


def write(storage: Storage, number: int, seconds: float) -> None:
    """The lease file of a holder elsewhere that expires in so many seconds from now."""
    expires = datetime.now(UTC) + timedelta(seconds=seconds)
    storage.write(f"_lease/{number:09d}.json", Holder("elsewhere", 7, f"id of {number}", expires).to_json())


def files(storage: Storage) -> dict[str, bool]:
    """Whether each lease file is held."""
    found = {}
    for name in storage.names("_lease"):
        held = json.loads(storage.read(name) or b"")["expires_at"]
        found[name] = held is not None and datetime.fromisoformat(held) > datetime.now(UTC)
    return found


def test_while_one_holds_it_another_is_told_who_and_until_when(storage: Storage) -> None:
    with Lease(storage), pytest.raises(NothingToDo) as refused, Lease(storage):
        raise AssertionError
    said = str(refused.value)
    assert said.startswith(f"process {os.getpid()} on {socket.gethostname()} is doing output {storage.url!r}")
    until = datetime.fromisoformat(said.split(" until ")[1])
    assert 290 < (until - datetime.now(UTC)).total_seconds() <= 300


def test_it_is_released_after_success_and_after_every_failure(storage: Storage) -> None:
    with Lease(storage):
        assert files(storage) == {"_lease/000000001.json": True}
    assert files(storage) == {"_lease/000000001.json": False}
    for number, error in enumerate((ValueError, JobStopped, KeyboardInterrupt), 2):
        with pytest.raises(error), Lease(storage):
            raise error
        assert files(storage) == {f"_lease/{number:09d}.json": False}


def test_the_lease_of_a_dead_job_is_taken_over_once_it_has_expired(storage: Storage) -> None:
    write(storage, 3, seconds=60)
    with pytest.raises(NothingToDo, match=r"process 7 on elsewhere is doing .* until \d{4}-"), Lease(storage):
        raise AssertionError
    write(storage, 3, seconds=-1)
    with Lease(storage):
        assert files(storage) == {"_lease/000000004.json": True}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"host": "h"}', b'{"host": 1, "pid": 1, "id": 1, "expires_at": "?"}']
)
def test_a_file_that_is_no_lease_holds_nothing(storage: Storage, content: bytes) -> None:
    storage.write("_lease/000000001.json", content)
    storage.write("_lease/notes.json", content)
    with Lease(storage):
        assert storage.names("_lease") == ["_lease/000000002.json", "_lease/notes.json"]


def race(storage: Storage, takers: int) -> list[Lease]:
    """Those who hold a lease after so many have tried to take it at once."""
    start = threading.Barrier(takers)

    def take(_: int) -> Lease | None:
        lease = Lease(Storage(storage.url, storage.settings))
        start.wait()
        try:
            return lease.__enter__()
        except NothingToDo:
            return None

    with ThreadPoolExecutor(takers) as pool:
        return [lease for lease in pool.map(take, range(takers)) if lease is not None]


@pytest.mark.parametrize("turn", range(5))
def test_an_expired_lease_is_taken_by_exactly_one_of_many(storage: Storage, turn: int) -> None:
    write(storage, 1 + turn, seconds=-1)
    (winner,) = race(storage, 12)
    winner.check()
    assert files(storage) == {f"_lease/{2 + turn:09d}.json": True}
    winner.__exit__(None, None, None)


def test_who_looked_before_others_came_and_went_does_not_take_an_old_number(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw number 1 expired, slept, and finds number 2 free again, for number 3 is held and has cleaned up."""
    write(storage, 1, seconds=-1)
    put = Storage.write_if_absent

    def late(self: Storage, name: str, content: bytes) -> bool:
        monkeypatch.setattr(Storage, "write_if_absent", put)
        with Lease(storage):
            pass
        Lease(storage).__enter__()
        return put(self, name, content)

    monkeypatch.setattr(Storage, "write_if_absent", late)
    with pytest.raises(NothingToDo), Lease(storage):
        raise AssertionError
    assert files(storage) == {"_lease/000000003.json": True}


def test_a_write_whose_answer_was_lost_is_known_for_ones_own(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Storage.write_if_absent
    monkeypatch.setattr(Storage, "write_if_absent", lambda *of: put(*of) and False)
    with Lease(storage) as lease:
        lease.check()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of two seconds that are renewed five times a second."""
    monkeypatch.setattr(leases, "LEASE_S", 2.0)
    monkeypatch.setattr(leases, "RENEW_S", 0.2)


@pytest.mark.usefixtures("short")
def test_it_is_renewed_for_as_long_as_it_is_held(storage: Storage) -> None:
    with Lease(storage) as lease:
        threading.Event().wait(3.0)
        lease.check()
        assert files(storage) == {"_lease/000000001.json": True}


@pytest.mark.usefixtures("short")
def test_a_holder_that_was_away_too_long_finds_its_successor_and_leaves_it_alone(storage: Storage) -> None:
    with Lease(storage) as lease:
        write(storage, 2, seconds=60)
        wait_until(lambda: bool(lease.lost), "noticing that the lease is lost")
        assert "process 7 on elsewhere has taken over output" in lease.lost
        with pytest.raises(JobStopped, match="had not renewed its lease in time"):
            lease.check()
    assert files(storage)["_lease/000000002.json"]


@pytest.mark.usefixtures("short")
def test_a_storage_that_is_away_for_a_while_costs_nobody_the_lease(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = Storage.write
    failed: list[str] = []

    def fails_twice(self: Storage, name: str, content: bytes) -> None:
        if len(failed) < 2:
            failed.append(name)
            raise StorageGone("away")
        put(self, name, content)

    monkeypatch.setattr(Storage, "write", fails_twice)
    with Lease(storage) as lease:
        before = storage.read("_lease/000000001.json")
        wait_until(lambda: storage.read("_lease/000000001.json") != before, "a renewal")
        lease.check()
    assert "could not be renewed (away): trying again" in caplog.text
    assert files(storage) == {"_lease/000000001.json": False}


def test_a_release_that_fails_does_not_hide_what_the_job_ended_with(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise StorageGone("away")

    lease = Lease(storage)
    lease.__enter__()
    monkeypatch.setattr(Storage, "write", fails)
    lease.__exit__(None, None, None)
    assert "could not be released (away): it expires by itself" in caplog.text


def test_on_object_storage_too_one_of_many_takes_it(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    storage = Storage(f"s3://{BUCKET}/lease")
    write(storage, 1, seconds=-1)
    (winner,) = race(storage, 6)
    assert files(storage) == {"_lease/000000002.json": True}
    winner.__exit__(None, None, None)
    assert files(storage) == {"_lease/000000002.json": False}
    with Lease(storage):
        assert files(storage) == {"_lease/000000003.json": True}
