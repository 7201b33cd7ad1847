"""The GPU benchmark runs where only torch and transformers are, and what it writes can be read: tried on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import benchmark_gpu

ROOT = Path(__file__).parents[2]

# What a machine with nothing but torch, transformers and what these need would not have.
PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "pyarrow", "matplotlib", "pipeline", "s3fs", "rouge_score"}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
from jobs.benchmark_gpu import main
sys.exit(main(sys.argv[1:]))
"""
SMALL = ["--shapes", "tiny", "--batch-sizes", "3", "--prompt-tokens", "30", "--new-tokens", "8", "--rounds", "1"]


@pytest.mark.slow
def test_a_dry_run_on_a_cpu_gives_every_figure_that_needs_no_gpu(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", *SMALL, "--peers", "transformers", "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "cpu.json").read_text())
    assert report["rates"]["bytes_per_second"] > 0
    assert report["equality"]["random weights"] == 1
    [result] = report["results"]
    assert "error" not in result
    rows = {row["name"]: row for row in result["contenders"]}
    assert list(rows) == ["transformers", "full depth", "2x", "3x"]
    assert rows["2x"]["decode_flop_speedup"] >= 2
    assert 0 < rows["3x"]["share_of_floor"] < 1
    assert result["cache_bytes"]["3x"][0] < result["cache_bytes"]["full depth"][0]
    for name in rows:
        assert name in done.stdout


def test_without_a_gpu_it_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert benchmark_gpu.main(["--device", "cuda", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "benchmark_gpu: error: torch sees no CUDA device; --device cpu --shapes tiny tries it out"
    ]
