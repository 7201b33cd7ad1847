"""What --plan promises of the demo is what the demo then costs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 600


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_tokens_and_flops_of_the_demo_are_planned_closely(tmp_path: Path) -> None:
    command = [sys.executable, "jobs/summarize_corpus.py", "--config", "infra/demo/summarize.yaml"]
    command += ["--output", str(tmp_path), "--ray-address", "local"]
    for flags in (["--plan", "--plan-prompts", "24"], []):
        done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "_plan.json").read_text())
    actual = json.loads((tmp_path / "_SUCCESS.json").read_text())["totals"]
    assert plan["prompt_tokens"] == pytest.approx(actual["prompt_tokens"], rel=0.15)
    assert plan["output_tokens"] == pytest.approx(actual["generated_tokens"], rel=0.15)
    assert plan["flops"] == pytest.approx(actual["flops_prompt"] + actual["flops_decode"], rel=0.15)
