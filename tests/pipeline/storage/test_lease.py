"""The lease on an output: one holder at a time, given up at every end, taken over when its holder is seen dead."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import BUCKET, wait_until

from pipeline.errors import JobError, JobStopped, NothingToDo
from pipeline.storage import lease as leases
from pipeline.storage.lease import Holder, Lease
from pipeline.storage.storage import Storage, StorageGone


def write(storage: Storage, number: int, released: bool = False) -> None:
    """The lease file of a holder elsewhere that has said no more since."""
    record = {"host": "elsewhere", "pid": 7, "id": f"id of {number}", "renewals": 3, "released": released}
    storage.write(f"_lease/{number:09d}.json", json.dumps(record).encode())


def files(storage: Storage) -> dict[str, bool]:
    """Whether each lease file is held."""
    return {name: not json.loads(storage.read(name) or b"")["released"] for name in storage.names("_lease")}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of a second, renewed and looked at ten times as often."""
    for name, seconds in (("LEASE_S", 1.0), ("RENEW_S", 0.1), ("LOOK_S", 0.1)):
        monkeypatch.setattr(leases, name, seconds)


@pytest.fixture
def lively(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, but no busy machine makes a holder seem dead."""
    monkeypatch.setattr(leases, "LEASE_S", 60.0)


@pytest.mark.usefixtures("lively")
def test_while_one_holds_it_and_lives_another_is_told_who(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pipeline")
    with Lease(storage), pytest.raises(NothingToDo) as refused, Lease(storage):
        raise AssertionError
    me = f"process {os.getpid()} on {socket.gethostname()}"
    assert str(refused.value) == f"{me} is doing output {storage.url!r}: it was just seen to renew its lease"
    assert f"{me} holds the lease on {storage.url!r}: if it renews it" in caplog.text


def test_it_is_released_after_success_and_after_every_failure(storage: Storage) -> None:
    with Lease(storage):
        assert files(storage) == {"_lease/000000001.json": True}
    assert files(storage) == {"_lease/000000001.json": False}
    for number, error in enumerate((ValueError(), JobStopped("a signal"), KeyboardInterrupt()), 2):
        with pytest.raises(type(error)), Lease(storage):
            raise error
        assert files(storage) == {f"_lease/{number:09d}.json": False}


@pytest.mark.usefixtures("short")
def test_a_holder_that_is_silent_for_a_lease_is_dead_and_only_then(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    write(storage, 3)
    start = time.monotonic()
    with Lease(storage):
        assert time.monotonic() - start >= 1.0
        assert files(storage) == {"_lease/000000004.json": True}
    assert "process 7 on elsewhere has not renewed its lease on" in caplog.text
    assert "this job takes over" in caplog.text


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("date", ["2099-01-01 00:00:00+00:00", "1970-01-01 00:00:00+00:00", "yesterday", 7, None])
def test_no_date_that_stands_in_a_lease_decides_anything(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, date: object
) -> None:
    record = {"host": "elsewhere", "pid": 7, "id": "x", "expires_at": date}
    storage.write("_lease/000000001.json", json.dumps(record).encode())
    start = time.monotonic()
    with Lease(storage):
        assert time.monotonic() - start >= 1.0

    # The same record, of a holder that lives.
    def renews() -> None:
        for renewals in range(1000):
            storage.write("_lease/000000003.json", json.dumps({**record, "renewals": renewals}).encode())
            if over.wait(0.1):
                return

    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        renewing = pool.submit(renews)
        wait_until(lambda: "_lease/000000003.json" in storage.names("_lease"), "a lease that is renewed")
        monkeypatch.setattr(leases, "LEASE_S", 60.0)
        with pytest.raises(NothingToDo, match="process 7 on elsewhere is doing"), Lease(storage):
            raise AssertionError
        over.set()
        renewing.result()


@pytest.mark.usefixtures("short")
def test_time_in_which_the_watcher_could_not_look_says_nothing_about_the_holder(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps through a whole lease, as a paused machine would, and the holder with it."""
    write(storage, 1)
    sleep, slept = time.sleep, []

    def pause(seconds: float) -> None:
        slept.append(seconds)
        sleep(1.5 if len(slept) == 1 else seconds)
        if len(slept) == 2:
            storage.write("_lease/000000001.json", Holder("elsewhere", 7, "id of 1", renewals=4).to_json())

    monkeypatch.setattr("pipeline.storage.lease.time.sleep", pause)
    with pytest.raises(NothingToDo, match="process 7 on elsewhere is doing"), Lease(storage):
        raise AssertionError


@pytest.mark.usefixtures("short")
def test_a_lease_that_is_released_while_another_waits_goes_to_that_one(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.storage.lease.LEASE_S", 60.0)
    write(storage, 1)
    timer = threading.Timer(0.3, lambda: write(storage, 1, released=True))
    timer.start()
    start = time.monotonic()
    with Lease(storage):
        assert time.monotonic() - start < 30
    timer.join()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"host": "h"}', b'{"host": 1, "pid": "?", "id": 1}', b"[" * 100_000]
)
def test_a_damaged_lease_is_watched_as_any_other(
    storage: Storage, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    storage.write("_lease/000000001.json", content)
    storage.write("_lease/notes.json", content)
    with Lease(storage):
        assert storage.names("_lease") == ["_lease/000000002.json", "_lease/notes.json"]
    assert "another job (_lease/000000001.json is damaged) has not renewed" in caplog.text


@pytest.mark.parametrize("number", [1, 2])
def test_a_folder_in_the_place_of_the_next_lease_ends_the_job(storage: Storage, number: int) -> None:
    if number == 2:
        write(storage, 1, released=True)
    in_the_way = Path(storage.path(f"_lease/{number:09d}.json"))
    in_the_way.mkdir(parents=True)
    said = rf"^_lease/{number:09d}.json of .* is in the way, for it is no file: remove it$"
    with pytest.raises(JobError, match=said):
        Lease(storage).__enter__()
    assert in_the_way.is_dir()


@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize("damage", [None, b"{"])
def test_a_lease_that_is_deleted_or_damaged_while_it_is_held_is_written_again(
    storage: Storage, damage: bytes | None
) -> None:
    with Lease(storage) as lease:
        if damage is None:
            Path(storage.path("_lease/000000001.json")).unlink()
        else:
            storage.write("_lease/000000001.json", damage)
        wait_until(lambda: storage.read("_lease/000000001.json") not in (None, damage), "a renewal")
        lease.check()
        with pytest.raises(NothingToDo), Lease(storage):
            raise AssertionError


@pytest.mark.usefixtures("lively")
def test_a_process_that_was_asleep_while_another_took_over_finds_out_at_its_next_check(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = """
import sys, time
from pipeline.errors import JobStopped
from pipeline.storage import lease as leases
from pipeline.storage.storage import Storage

leases.RENEW_S = 0.1
with leases.Lease(Storage(sys.argv[1])) as lease:
    print("held", flush=True)
    while True:
        time.sleep(0.05)
        try:
            lease.check()
        except JobStopped as stopped:
            sys.exit(str(stopped))
"""
    held = subprocess.Popen(
        [sys.executable, "-c", holds, storage.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with held:
        try:
            assert held.stdout is not None
            assert held.stdout.readline() == "held\n"
            with pytest.raises(NothingToDo, match=f"process {held.pid} on"), Lease(storage):
                raise AssertionError
            held.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(leases, "LEASE_S", 1.0)
            with Lease(storage) as lease:
                held.send_signal(signal.SIGCONT)
                _, said = held.communicate(timeout=60)
                assert f"process {os.getpid()} on {socket.gethostname()} has taken over output" in said
                lease.check()
                assert files(storage)["_lease/000000002.json"]
        finally:
            held.kill()  # or to leave it would wait for it


@pytest.mark.usefixtures("short")
def test_of_two_that_hold_one_number_since_it_was_deleted_one_stops(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, renew = threading.Event(), Lease._renew

    def renew_once_both_hold(self: Lease) -> None:
        both.wait(60)
        renew(self)

    monkeypatch.setattr(Lease, "_renew", renew_once_both_hold)
    with Lease(storage) as first:
        Path(storage.path("_lease/000000001.json")).unlink()
        with Lease(storage) as second:
            both.set()
            wait_until(lambda: bool(first.lost or second.lost), "one of them noticing")
            time.sleep(1.0)  # several renewals
            assert bool(first.lost) != bool(second.lost)


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


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("turn", range(3))
def test_a_dead_jobs_lease_is_taken_by_exactly_one_of_many(storage: Storage, turn: int) -> None:
    write(storage, 1 + turn)
    (winner,) = race(storage, 12)
    winner.check()
    assert files(storage) == {f"_lease/{2 + turn:09d}.json": True}
    winner.__exit__(None, None, None)


@pytest.mark.usefixtures("short")
def test_who_looked_before_others_came_and_went_does_not_take_an_old_number(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw number 1 released, slept, and finds number 2 free again, for number 3 is held and has cleaned up."""
    write(storage, 1, released=True)
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


@pytest.mark.usefixtures("short")
def test_it_is_renewed_for_as_long_as_it_is_held(storage: Storage) -> None:
    def renewals() -> int:
        found: int = json.loads(storage.read("_lease/000000001.json") or b"{}").get("renewals", 0)
        return found

    with Lease(storage) as lease:
        wait_until(lambda: renewals() >= 3, "three renewals")
        lease.check()
        assert files(storage) == {"_lease/000000001.json": True}


@pytest.mark.usefixtures("short")
def test_a_holder_that_was_away_too_long_finds_its_successor_and_leaves_it_alone(storage: Storage) -> None:
    with Lease(storage) as lease:
        write(storage, 2)
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
    assert "could not be released (away): the next job waits for 120 s" in caplog.text


@pytest.mark.usefixtures("short", "credentials")
def test_on_object_storage_too_one_of_many_takes_it() -> None:
    storage = Storage(f"s3://{BUCKET}/lease")
    write(storage, 1)
    (winner,) = race(storage, 6)
    assert files(storage) == {"_lease/000000002.json": True}
    winner.__exit__(None, None, None)
    assert files(storage) == {"_lease/000000002.json": False}
    with Lease(storage):
        assert files(storage) == {"_lease/000000003.json": True}
