"""The local cluster's script as a newcomer starts it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
def test_one_command_starts_servers_runs_the_job_shows_rows_and_cleans_up() -> None:
    command = [sys.executable, "infra/local/demo.py", "--", "--limit", "4", "--max-new-tokens", "6"]
    with tempfile.TemporaryDirectory(prefix="d") as scratch:  # short: Ray's sockets lie below it
        started = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"TMPDIR": scratch}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            said, _ = started.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            started.terminate()  # it ends its servers
            said, _ = started.communicate()
        left = list(Path(scratch).iterdir())
    assert started.returncode == 0, said
    assert "4 rows in s3://demo/summaries/data/" in said
    assert not [path for path in left if path.name.startswith("sd")]
