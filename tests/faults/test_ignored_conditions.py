"""A store that writes over what was to be written only if absent is found out before a run relies on it."""

from __future__ import annotations

import pytest
from engine_double import NoEngineBackend
from servers import BUCKET
from trial import Trial

from pipeline.errors import JobError
from pipeline.preparing.run_record import claim_output
from pipeline.run import run_job
from pipeline.storage.storage import Storage


@pytest.fixture
def elsewhere(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Trial:
    for name, value in trial.server.environment.items():
        monkeypatch.setenv(name, value)
    return trial


def output(trial: Trial) -> Storage:
    return trial.config().output_storage()


def left(trial: Trial) -> list[str]:
    """Objects in the output; the server may go on listing the empty folder itself."""
    root = f"{BUCKET}/{trial.name}/out"
    return [path for path in trial.server.files.find(root) if path.rstrip("/") != root]


@pytest.mark.parametrize("incremental", [False, True])
def test_such_a_store_is_refused_and_left_as_it_was(elsewhere: Trial, incremental: bool) -> None:
    refused = pytest.raises(JobError, match=r"cannot hold an output, for it replaces an object .* and copy")
    with elsewhere.proxy.ignoring_conditions(elsewhere.server.environment), refused:
        run_job(elsewhere.config(incremental=incremental), NoEngineBackend())
    assert left(elsewhere) == []


def test_a_run_on_such_a_store_is_not_taken_over(elsewhere: Trial) -> None:
    description = {"schedule": {"layers": 1}, "sampling": {}, "input": {}}
    claim_output(output(elsewhere), {"model": "one", **description})
    record = output(elsewhere).read("_run.json")
    refused = pytest.raises(JobError, match=r"belongs to run .* differs in model")
    with elsewhere.proxy.ignoring_conditions(elsewhere.server.environment), refused:
        claim_output(output(elsewhere), {"model": "another", **description})
    assert output(elsewhere).read("_run.json") == record


def test_a_store_that_keeps_conditions_is_proven_in_requests_that_leave_nothing(elsewhere: Trial) -> None:
    counts = elsewhere.proxy.arm(elsewhere.name)
    output(elsewhere).prove_put_if_absent()
    assert dict(counts) == {"PUT _probe": 2}  # and a removal, which is not counted
    assert left(elsewhere) == []
