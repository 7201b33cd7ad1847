"""Three of what `make chaos` plays by the hundred: its parts are those of the other tests here, and go on fitting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from servers import IMPORTS, stop

SEED, SCHEDULES = 90, 3  # replicas, a node, a driver and the server die, files are swapped, the store drops conditions
FAULTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_random_fault_schedules_are_played_and_harm_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(FAULTS / "chaos.py"), "--schedules", str(SCHEDULES), "--seed", str(SEED)]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": IMPORTS}, stdout=said, stderr=said, start_new_session=True
        )
        try:
            process.wait(540)
        finally:
            stop(process)
    told = (tmp_path / "said").read_text()
    assert process.returncode == 0, told
    figures, _ = json.JSONDecoder().raw_decode(told, told.rindex("\n{\n") + 1)
    assert figures["failed seeds"] == []
    assert figures["killed: driver"] > 0
    assert figures["killed: replica"] + figures["killed: node"] > 0
    assert figures["rows checked"] > 0
