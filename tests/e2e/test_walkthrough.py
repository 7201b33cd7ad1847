"""The walk-through of docs/running.md, line by line as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine import Schedule

ROOT = Path(__file__).parents[2]
TITLE, SERVER = "## From a corpus to a nightly job\n", "/srv/skipdecode"
LIMIT_S = 1200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


def blocks(language: str) -> list[str]:
    """Fenced blocks of the walk-through, in order."""
    section = (ROOT / "docs/running.md").read_text().split(TITLE)[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def test_it_ends_in_an_adapted_audited_job_that_the_next_night_finds_done(tmp_path: Path) -> None:
    for name in ("engine", "pipeline", "jobs", "infra"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)

    def sh(script: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    said = sh("".join(blocks("bash")))
    assert "verified: " in said
    walk = tmp_path / "out/walk"
    adapted = Schedule.read(walk / "adapted")
    assert adapted.bridges
    assert "adapted_on" in adapted.provenance
    manifest = json.loads((walk / "summaries/_SUCCESS.json").read_text())
    assert manifest["totals"]["audited"] > 0
    rows = sum(pq.read_metadata(walk / "summaries" / commit["file"]).num_rows for commit in manifest["commits"])
    assert rows == pq.read_metadata(ROOT / "infra/demo/package_descriptions.parquet").num_rows
    for report in ("quality", "summaries"):
        assert (walk / report / "report.html").is_file()

    (night,) = blocks("crontab")
    command = night.split(maxsplit=5)[5]
    assert SERVER in command
    assert "nothing is new" in sh(command.replace(SERVER, str(tmp_path)))
