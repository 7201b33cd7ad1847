"""A driver that is told to end. On a cluster of its own: late commits would leave nothing to stop."""

import re

import pytest
from fault_proxy import Fault
from test_processes import UNIT_TOKENS, address, ended
from trial import Trial

from jobs.command_line import STOPPED_EXIT

pytestmark = [pytest.mark.usefixtures("cluster", "credentials"), pytest.mark.timeout(600)]


def test_sigterm_lets_units_in_flight_finish_and_ends_resumably(trial: Trial) -> None:
    # Many slow units, one a pass: the first commit may come late on a busy machine, and some must be left by then.
    driver = trial.start(seconds_per_batch=4.0, ray_address=address(), rows_per_unit=1, batch_size=1)
    trial.proxy.arm(trial.name, [Fault("PUT _commits", 1, "call after", call=driver.terminate)])
    said = ended(driver)
    assert driver.returncode == STOPPED_EXIT, said
    assert "stopping: SIGTERM (units in flight have " in said
    assert re.search(r"stopped: SIGTERM: \d+ of 24 rows are committed, start the job again to resume", said)
    before = trial.tokens_generated  # how many of them are lost says how late the machine committed
    result = trial.run(rows_per_unit=1, batch_size=1)
    assert 1 <= result.rows_resumed < 24
    trial.check()
    left = trial.tokens_of_one_pass * (24 - result.rows_resumed) / 24
    assert trial.tokens_generated - before <= left + 2 * UNIT_TOKENS
