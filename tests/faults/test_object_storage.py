"""Jobs on a real S3 server that throttles, drops, loses answers, goes down, or refuses."""

import threading

import pytest
from engine_double import NoEngineBackend
from fault_proxy import Action, Fault
from trial import Trial

from pipeline.errors import JobStopped
from pipeline.run import run_job

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(600)]

UNITS, FILES = 6, 2
READS = ("LIST in", "HEAD in", "GET in", "GET data")
WRITES = ("PUT _run.json", "PUT data", "PUT _commits", "PUT report.html", "PUT _SUCCESS.json")


def test_what_a_run_and_its_resumption_ask_of_the_storage(trial: Trial) -> None:
    counts = trial.proxy.arm(trial.name)
    trial.run()
    per_unit = {"PUT data": UNITS, "PUT _commits": UNITS}
    # Planning: one look at the path, then per file its size and identity, and its footer.
    # Reading: per span of units (here a file) its footer, and its columns in one range; its size is in its stamp.
    reading = {"LIST in": 2, "HEAD in": 1 + FILES, "GET in": 3 * FILES}
    # Of what files the run is, asked for and then written.
    # The record is looked at for the columns that are kept, to claim it, and before it is published.
    claim = {"PUT _run.json": 1, "GET _run.json": 3, "GET _input": 1, "PUT _input": 1}
    # Put-if-absent is proven before it is relied on; a resumption takes that from there being a record.
    claim |= {"PUT _probe": 2}
    # Whether the output is this run's to write to; where there is none, s3fs looks twice.
    claim |= {"LIST ": 2}
    # It looks into 20 units at most, and compares with a plan if one was made.
    report = {"GET _plan.json": 1, "HEAD data": UNITS, "GET data": 2 * UNITS, "PUT report.html": 1}
    # Before it is published: whether each commit's file is there, and which files no commit names.
    end = {"LIST data": 2}
    assert dict(counts) == per_unit | reading | claim | report | end | {"PUT _SUCCESS.json": 1}
    trial.check()

    counts = trial.proxy.arm(trial.name)
    run_job(trial.config(), NoEngineBackend())
    planning = {"LIST in": 2, "HEAD in": 1 + FILES, "GET in": FILES}
    claim = {"GET _run.json": 3, "GET _input": 1}  # first, whether the record is one of ours
    resuming = {
        "LIST _commits": 1,
        "GET _snapshot.json.gz": 1,
        "GET _commits": UNITS,
        "LIST _failed": 1,
        "LIST ": 2,  # whose the output is; whether there is a report
        "GET _SUCCESS.json": 1,
        "GET report.html": 1,  # written after the manifest, so it may be missing, or that of an earlier session
    }
    assert dict(counts) == planning | claim | resuming | end


def test_throttling_errors_and_resets_at_every_kind_of_request_cost_nothing_but_time(trial: Trial) -> None:
    actions: tuple[Action, ...] = ("throttle", "fail", "reset")
    faults = [Fault(kind, nth, action) for kind in (*READS, *WRITES) for nth, action in enumerate(actions, 1)]
    trial.proxy.arm(trial.name, faults)
    trial.run()
    assert all(fault.hits for fault in faults)
    trial.check()
    assert trial.tokens_generated == trial.tokens_of_one_pass


def test_a_write_whose_answer_is_lost_is_known_for_ones_own(trial: Trial) -> None:
    faults = [Fault(kind, 1, "lose", times=2) for kind in WRITES]
    counts = trial.proxy.arm(trial.name, faults)
    trial.run()
    assert all(fault.hits == 2 for fault in faults)
    assert counts["GET _commits"] > 0  # refused with 412, it looked whose record stands there
    trial.check()
    assert trial.tokens_generated == trial.tokens_of_one_pass


def test_answers_that_come_in_part_or_slowly_are_read_whole(trial: Trial) -> None:
    faults = [
        Fault(kind, nth, action) for kind in READS if kind != "HEAD in" for nth, action in ((1, "cut"), (2, "slow"))
    ]
    trial.proxy.arm(trial.name, faults)
    trial.run()
    assert all(fault.hits for fault in faults)
    trial.check()


@pytest.mark.slow
def test_a_server_killed_and_back_within_patience_is_waited_for(trial: Trial) -> None:
    def restart() -> None:
        trial.server.kill()
        threading.Timer(2.0, trial.server.start).start()

    trial.proxy.arm(trial.name, [Fault("PUT _commits", 2, "call before", call=restart)])
    trial.run()
    trial.check()
    assert trial.tokens_generated == trial.tokens_of_one_pass


def test_a_server_that_stays_away_ends_the_job_resumably(trial: Trial) -> None:
    def kill() -> None:
        trial.wait_for_commits(2)
        trial.server.kill()

    trial.proxy.arm(trial.name, [Fault("PUT _commits", 3, "call before", call=kill)])
    try:
        with pytest.raises(JobStopped, match=r"has not worked for 2 s .* start the job again to resume"):
            trial.run(seconds_per_batch=0.5, storage_patience_s=2.0)
    finally:
        trial.server.start()
    before = trial.tokens_generated
    resumed = trial.run().rows_resumed
    trial.check()
    assert resumed >= 8
    assert trial.tokens_generated - before <= trial.tokens_of_one_pass * (24 - resumed) / 24 + 50
