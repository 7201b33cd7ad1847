"""A schedule made deliberately bad is found out on a real job, early, and the job can be resumed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.schedules import recipes

ROOT = Path(__file__).parent.parent.parent
CORPUS = ROOT / "infra" / "demo" / "package_descriptions.parquet"
ROWS, STOPPED = 1600, 4


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "jobs/summarize_corpus.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_bad_schedule_is_stopped_within_the_first_twentieth_of_the_rows(tmp_path: Path) -> None:
    texts = pq.read_table(CORPUS, columns=["text"])["text"].to_pylist()
    short = sorted(texts, key=len)[:40]
    pq.write_table(pa.table({"id": range(ROWS), "text": [short[i % 40] for i in range(ROWS)]}), tmp_path / "in.parquet")
    bad = recipes.skipdecode(layers=30, warmup=1, max_active=12, min_active=12, horizon=1)
    (tmp_path / "schedule.json").write_text(bad.to_json())
    output = tmp_path / "out"
    arguments = [
        "--input", str(tmp_path / "in.parquet"), "--output", str(output), "--ray-address", "local", "--id-column", "id",
        "--schedule", str(tmp_path / "schedule.json"), "--max-new-tokens", "8", "--rows-per-unit", "8",
        "--audit-fraction", "0.5", "--batch-size", "8",
    ]  # fmt: skip
    guarded = [*arguments, "--min-audit-rouge", "0.6"]

    stopped = start(*guarded)
    assert stopped.returncode == STOPPED, stopped.stderr
    assert "stopped: the schedule's outputs are too far from full depth: ROUGE-L to full depth 0." in stopped.stderr
    commits = [json.loads(file.read_text()) for file in (output / "_commits").glob("*.json")]
    rows, audited = (sum(commit["totals"][name] for commit in commits) for name in ("rows", "audited"))
    assert 8 <= audited < rows <= ROWS / 20
    assert not (output / "_SUCCESS.json").exists()

    again = start(*guarded)  # nothing has changed: it stops before it spends more
    assert again.returncode == STOPPED, again.stderr
    assert len(list((output / "_commits").glob("*.json"))) == len(commits)

    # Resumable: with the minimum lowered, the same run goes on where it was.
    process = subprocess.Popen([sys.executable, "jobs/summarize_corpus.py", *arguments], cwd=ROOT, text=True)
    try:
        deadline = time.monotonic() + 400
        while len(list((output / "_commits").glob("*.json"))) < len(commits) + 2 and time.monotonic() < deadline:
            time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == STOPPED
    finally:
        process.kill()
    held = {file.stem: json.loads(file.read_text())["file"] for file in (output / "_commits").glob("*.json")}
    assert len(held) >= len(commits) + 2
    assert {commit["unit"]: commit["file"] for commit in commits}.items() <= held.items()
