"""One job works on an output at a time, and who has lost its lease touches nothing."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from engine_double import Echo, EchoBackend, NoEngineBackend
from fixture_types import Job
from inline_session import InlineSession
from servers import wait_until

from jobs import command_line, summarize_corpus
from pipeline import run
from pipeline.commits.commit import COMMITS, read_commits
from pipeline.config import JobConfig
from pipeline.errors import JobError, JobStopped
from pipeline.run import run_job
from pipeline.storage import lease
from pipeline.storage.lease import Holder, Lease
from pipeline.storage.storage import Storage
from tests.pipeline.preparing.nights import Put, by, generations, snapshot, texts


def test_a_second_job_ends_well_once_the_other_is_seen_alive_and_says_who_is_at_work(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put("a", 6)
    config = nightly()
    monkeypatch.setattr(run, "prepare_run", None)
    for name, seconds in (("LEASE_S", 60.0), ("RENEW_S", 0.2), ("LOOK_S", 0.2)):
        monkeypatch.setattr(lease, name, seconds)
    flags = ["--input", config.input, "--output", config.output, "--incremental"]
    monkeypatch.setattr(sys, "argv", ["summarize_corpus.py", *flags])
    with Lease(Storage(config.output)):
        job = summarize_corpus.SummarizeCorpus, summarize_corpus.PROGRAM, summarize_corpus.summarize
        assert command_line.start(*job) == 0
    said = capsys.readouterr().err.strip().splitlines()
    assert f"nothing to do: process {os.getpid()} on " in said[-1]
    assert f"is doing output '{config.output}': it was just seen to renew its lease" in said[-1]


def test_the_lease_is_given_up_after_success_and_after_failure(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 60.0)
    put("a", 6)
    for taken, options in enumerate(({}, {"text_column": "body"}, {"seed": 9}), start=1):
        with pytest.raises(JobError) if options else nullcontext():
            run_job(nightly(**options), by("one"))
        newest = Path(nightly().output, f"_lease/{taken:09d}.json")
        assert json.loads(newest.read_text())["released"] is True


def test_a_job_that_lost_its_lease_with_its_last_unit_takes_nothing_out_and_finishes_nothing(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = nightly()
    put("a", 6)
    run_job(config, by("one"))
    put("a", 6, "v2")
    with monkeypatch.context() as patch:
        overtaken_at(InlineSession, "run", config, patch)
        with pytest.raises(JobStopped, match="process 7 on elsewhere has taken over output"):
            run_job(config, by("two"))
    assert len(read_commits(Storage(config.output))) == 2 + 2
    assert not Path(config.output, "_SUCCESS.json").exists()
    run_job(config, NoEngineBackend())
    assert generations(config.output) == texts("two", "a", 6, "v2")


@pytest.mark.parametrize(
    ("step", "fresh"), [("prepare_run", False), ("prepare_run", True), ("claim_output", False), ("read_commits", False)]
)
def test_a_job_that_lost_its_lease_while_it_planned_leaves_its_successors_output_as_it_is(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch, step: str, fresh: bool
) -> None:
    config = nightly()
    put("a", 6)
    run_job(config, by("one"))
    put("a", 6, "v2")
    before = snapshot(config.output)
    overtaken_at(run, step, config, monkeypatch)
    with pytest.raises(JobStopped, match="process 7 on elsewhere has taken over output"):
        run_job(nightly(fresh=fresh), NoEngineBackend())
    assert snapshot(config.output) == before


def test_a_job_that_loses_its_lease_at_its_end_sweeps_nothing(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = nightly()
    put("a", 6)
    run_job(config, by("one"))
    (commit, _) = read_commits(Storage(config.output))
    Path(config.output, f"data/{commit.unit}-0123456789ab.parquet").write_bytes(b"came second")
    before = snapshot(config.output)
    overtaken_at(run, "_check_complete", config, monkeypatch)
    with pytest.raises(JobStopped, match="process 7 on elsewhere has taken over output"):
        run_job(config, NoEngineBackend())
    assert snapshot(config.output) == before


def overtaken_at(owner: Any, step: str, config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another job take the lease of an output's second job, and end, while that is at a step of its owner."""
    whole = getattr(owner, step)

    def overtaken(*of: Any, **named: Any) -> Any:
        result = whole(*of, **named)
        holder = Holder("elsewhere", 7, "another", released=True)
        Storage(config.output).write("_lease/000000003.json", holder.to_json())
        return result

    monkeypatch.setattr(owner, step, overtaken)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_on_ray_a_job_that_lost_its_lease_stops(nightly_on_ray: Job, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put("a", 400)  # more than are done before a busy machine tells of the first commit
    config = nightly_on_ray(batch_size=4)
    storage = Storage(config.output)
    receive = run.Session._receive

    def overtaken(self: Any, parcel: Any) -> str:
        storage.write("_lease/000000002.json", Holder("elsewhere", 7, "another", released=True).to_json())
        wait_until(lambda: self._lease.lost != "", "noticing the loss")
        return receive(self, parcel)

    with monkeypatch.context() as patch:
        patch.setattr(lease, "RENEW_S", 0.2)
        patch.setattr(run.Session, "_receive", overtaken)
        with pytest.raises(JobStopped, match="process 7 on elsewhere has taken over output"):
            run_job(config, EchoBackend(Echo("one: ", seconds_per_batch=0.3)))
    assert not Path(config.output, "_SUCCESS.json").exists()
    assert storage.names("_lease")[-1] == "_lease/000000002.json"
    assert 0 < len(storage.names(COMMITS)) < 100
