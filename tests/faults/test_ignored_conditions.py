"""A store that writes over what was to be written only if absent is found out before a run relies on it."""

import pytest
from engine_double import NoEngineBackend
from servers import BUCKET
from trial import Trial

from pipeline.errors import JobError
from pipeline.preparing.run_record import claim_output
from pipeline.run import run_job
from pipeline.storage.storage import Storage


def output(trial: Trial) -> Storage:
    return trial.config().output_storage()


def left(trial: Trial) -> list[str]:
    """Objects in the output; the server may go on listing the empty folder itself."""
    root = f"{BUCKET}/{trial.name}/out"
    return [path for path in trial.server.files.find(root) if path.rstrip("/") != root]


@pytest.mark.parametrize("incremental", [False, True])
def test_such_a_store_is_refused_and_left_as_it_was(trial: Trial, incremental: bool) -> None:
    refused = pytest.raises(JobError, match=r"cannot hold an output, for it replaces an object .* and copy")
    with trial.proxy.ignoring_conditions(trial.server.environment), refused:
        run_job(trial.config(incremental=incremental), NoEngineBackend())
    assert left(trial) == []


def test_a_run_on_such_a_store_is_not_taken_over(trial: Trial) -> None:
    description = {"schedule": {"layers": 1}, "sampling": {}, "input": {}}
    claim_output(output(trial), {"model": "one", **description})
    record = output(trial).read("_run.json")
    refused = pytest.raises(JobError, match=r"belongs to run .* differs in model")
    with trial.proxy.ignoring_conditions(trial.server.environment), refused:
        claim_output(output(trial), {"model": "another", **description})
    assert output(trial).read("_run.json") == record


def test_a_store_that_keeps_conditions_is_proven_in_requests_that_leave_nothing(trial: Trial) -> None:
    counts = trial.proxy.arm(trial.name)
    output(trial).prove_put_if_absent()
    assert dict(counts) == {"PUT _probe": 2}  # and a removal, which is not counted
    assert left(trial) == []
