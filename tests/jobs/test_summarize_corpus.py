"""What the main job says when there is nothing to generate: mistakes, and plans."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_double import EchoBackend

from jobs import summarize_corpus
from pipeline.commits.commit import Totals
from pipeline.run import RunResult

ROOT = Path(__file__).parent.parent.parent
CORPUS = "infra/demo/package_descriptions.parquet"
Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start() -> Start:
    """Runs the script from the repository's root."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "jobs/summarize_corpus.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)

    return run


def test_a_missing_column_is_one_line_and_exit_code_1(start: Start, tmp_path: Path) -> None:
    ended = start("--input", CORPUS, "--output", str(tmp_path / "out"), "--text-column", "body")
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("summarize_corpus.py: error: the input has no column 'body'")
    assert not (tmp_path / "out").exists()


def test_a_plan_is_printed_and_stored_before_anything_runs(start: Start, tmp_path: Path) -> None:
    output = tmp_path / "out"
    flags = ["--input", CORPUS, "--output", str(output), "--id-column", "id", "--max-new-tokens", "16"]
    ended = start(*flags, "--target-speedup", "1.1", "--plan", "--plan-output-tokens", "16")
    assert ended.returncode == 0, ended.stderr
    assert "whole-job FLOP speed-up" in ended.stdout
    assert f"figures: {output}/_plan.json" in ended.stdout
    assert [file.name for file in output.iterdir()] == ["_plan.json"]
    figures = json.loads((output / "_plan.json").read_text())
    assert figures["rows"] == figures["sampled_rows"] == 100
    assert figures["output_tokens"] == 1600
    assert figures["decode_speedup"] >= 1.1 > figures["sample_speedup"] > 1


@pytest.mark.parametrize("report", ["out/report.html", ""])
def test_only_a_report_that_was_written_is_announced(
    report: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = summarize_corpus.SummarizeCorpus(input="in", output="out")
    result = RunResult("out", report, 0, Totals(), EchoBackend().shape(config), 1.0, 1.0)
    monkeypatch.setattr(summarize_corpus, "run_job", lambda _: result)
    summarize_corpus.summarize(config)
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if "report:" in line] == [f"report: {report}"] * bool(report)
