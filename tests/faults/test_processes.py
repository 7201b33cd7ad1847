"""Jobs whose workers, replicas, drivers and nodes die at chosen points of the commit protocol."""

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import ray
from fault_proxy import Action, Fault, FaultProxy
from servers import BUCKET, S3Server
from trial import Trial, kill_replicas, own_processes

pytestmark = [pytest.mark.usefixtures("cluster", "credentials"), pytest.mark.timeout(600)]

LIMIT_S = 280
UNIT_TOKENS = 4 * 12


def ended(driver: subprocess.Popen[str]) -> str:
    """What a driver said until its end, which has to come."""
    try:
        said, _ = driver.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        driver.kill()
        raise
    return said


def address() -> str:
    """Address of the Ray of these tests, for drivers that are to share it."""
    found: str = ray.get_runtime_context().gcs_address
    return found


@pytest.mark.slow
def test_tasks_killed_around_every_read_write_and_commit_are_done_again(trial: Trial) -> None:
    faults = [
        Fault("GET in", 5, "kill before"),  # the first four are the planning's and the first span's footers
        Fault("PUT data", 2, "kill before"),
        Fault("PUT data", 4, "kill after"),
        Fault("PUT _commits", 2, "kill before"),
        Fault("PUT _commits", 4, "kill after"),
    ]
    trial.proxy.arm(trial.name, faults)
    trial.run()
    assert all(fault.killed for fault in faults)
    trial.check()


@pytest.mark.slow
def test_a_killed_replica_costs_at_most_the_units_it_held(trial: Trial) -> None:
    fault = Fault("PUT _commits", 3, "call before", call=kill_replicas)
    trial.proxy.arm(trial.name, [fault])
    trial.run(seconds_per_batch=0.5)
    assert fault.killed
    trial.check()
    assert trial.tokens_generated <= trial.tokens_of_one_pass + 3 * UNIT_TOKENS


@pytest.mark.parametrize(
    ("operation", "nth", "action", "committed"),
    [
        ("PUT _commits", 3, "call before", 2),
        pytest.param("PUT _SUCCESS.json", 1, "call before", 6, marks=pytest.mark.slow),
    ],
)
def test_a_killed_driver_costs_at_most_its_units_in_flight(
    trial: Trial, operation: str, nth: int, action: Action, committed: int
) -> None:
    driver = trial.start(seconds_per_batch=1.0, ray_address=address())

    def kill() -> None:
        trial.wait_for_commits(committed)
        driver.kill()

    trial.proxy.arm(trial.name, [Fault(operation, nth, action, call=kill)])
    ended(driver)
    assert driver.returncode == -signal.SIGKILL
    result = trial.run()
    assert result.rows_resumed >= 4 * committed
    trial.check()
    assert trial.tokens_generated <= trial.tokens_of_one_pass + 3 * UNIT_TOKENS


@dataclass(frozen=True)
class TwoDrivers:
    """A nightly job's driver that was killed, and the next one, started at once."""

    trial: Trial
    codes: list[int]
    said: list[str]
    shown: list[str]  # command lines of all processes, while the second was at work


@pytest.fixture(scope="module")
def nightly(
    cluster: None, s3: S3Server, proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoDrivers]:
    trial = Trial(s3, proxy, tmp_path_factory.mktemp("nightly"), rows=40)
    try:
        yield killed_and_started_again(trial)
    finally:
        trial.close()


def killed_and_started_again(trial: Trial) -> TwoDrivers:
    times = {"LEASE_S": 10.0, "RENEW_S": 1.0, "LOOK_S": 0.5}
    shown: list[str] = []

    def look() -> None:
        shown.extend(" ".join(process.cmdline()) for process in own_processes(""))

    drivers = [trial.start(0.3, times, ray_address=address(), incremental=True)]
    trial.proxy.arm(trial.name, [Fault("PUT _commits", 4, "call before", call=drivers[0].kill)])
    said = [ended(drivers[0])]
    assert not any("_SUCCESS" in path for path in trial.server.files.find(f"{BUCKET}/{trial.name}/out"))
    drivers.append(trial.start(0.3, times, ray_address=address(), incremental=True))
    trial.proxy.arm(trial.name, [Fault("PUT _commits", 1, "call before", call=look), Fault("PUT data", 2, "fail")])
    said.append(ended(drivers[1]))
    return TwoDrivers(trial, [driver.returncode for driver in drivers], said, shown)


def test_a_nightly_driver_killed_and_started_again_at_once_waits_takes_over_and_finishes(nightly: TwoDrivers) -> None:
    trial, (_, said) = nightly.trial, nightly.said
    assert nightly.codes == [-signal.SIGKILL, 0], said
    assert "has not renewed its lease" in said
    assert "nothing to do" not in said
    assert said.strip().splitlines()[-1] == "40"
    trial.check()
    assert trial.tokens_generated <= trial.tokens_of_one_pass + 7 * UNIT_TOKENS


def test_no_secret_is_in_what_a_driver_says_shows_or_writes(nightly: TwoDrivers) -> None:
    files, secret = nightly.trial.server.files, nightly.trial.server.environment["AWS_SECRET_ACCESS_KEY"]
    assert any("driver.py" in line for line in nightly.shown)
    written = [files.cat_file(path) for path in files.find(f"{BUCKET}/{nightly.trial.name}/out")]
    assert len(written) >= 15
    assert secret not in "".join(nightly.shown + nightly.said)
    assert not any(secret.encode() in content for content in written)


@pytest.mark.slow
def test_two_drivers_on_one_output_agree_on_every_unit(trial: Trial) -> None:
    drivers = [trial.start(0.3, ray_address=address(), threads_per_replica=1) for _ in range(2)]
    said = [ended(driver) for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], said
    trial.check()
