"""A contender as the benchmark sees it: a process that is loaded once and told to go."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from jobs.benchmarks.peers.protocol import Job
from pipeline.errors import JobError

PROJECT = Path(__file__).parents[2]
PATIENCE_S = 30  # for a process to end once its input has


@dataclass(frozen=True)
class Runner:
    """A program in `jobs.benchmarks.peers` and where it can run."""

    module: str
    label: str
    needs: tuple[str, ...]  # modules
    environment: Literal["own", "peers", "vllm"] = "own"
    takes_schedules: bool = False
    variant: str = ""

    def missing(self, python: str) -> str | None:
        """Why it can't run under an interpreter, in one sentence; None if it can."""
        remedy = REMEDIES[self.environment]
        if not Path(python).is_file():
            return f"{self.label} is left out: there is no {python}; {remedy}"
        search = "import sys, importlib.util as i; print(*(n for n in sys.argv[1:] if not i.find_spec(n)))"
        found = subprocess.run([python, "-c", search, *self.needs], cwd=PROJECT, capture_output=True, text=True)
        if found.returncode:
            return f"{self.label} is left out: {python} does not run; {remedy}"
        absent = found.stdout.split()
        return f"{self.label} is left out: {python} has no {', '.join(absent)}; {remedy}" if absent else None


REMEDIES = {"own": "make install", "peers": "make peers", "vllm": "make vllm-env"}  # by environment
VARIANTS = {
    "lock-step": " in lock-step",
    "unpacked": ", weights not packed",
    "torch-norm": ", torch's norm",
    "unshared": ", instruction in every prompt",
}
RUNNERS = {
    **{
        variant or "engine": Runner("own_engine", f"our engine{how}", ("engine",), "own", True, variant)
        for variant, how in {"": "", **VARIANTS}.items()
    },
    "transformers": Runner("transformers", "transformers", ("transformers",), "peers"),
    "ctranslate2": Runner("ctranslate2", "CTranslate2", ("ctranslate2", "transformers"), "peers"),
    "openvino": Runner("openvino", "OpenVINO GenAI", ("openvino_genai", "optimum"), "peers"),
    "vllm": Runner("vllm", "vLLM", ("vllm",), "vllm", takes_schedules=True),
}
# What vLLM needs beyond itself to run a schedule.
VLLM_PLUGIN = Runner("vllm", "vLLM under schedules", ("vllm", "engine.vllm"), "vllm")


@dataclass
class Worker:
    """One contender's process."""

    name: str
    runner: Runner
    python: str
    job: Job
    log: Path  # what it and its libraries print
    _process: subprocess.Popen[str] = field(init=False)

    def load(self) -> dict[str, Any]:
        """Start it and wait until it is loaded and warm: its version and load_seconds. Raises JobError."""
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [self.python, "-m", f"jobs.benchmarks.peers.{self.runner.module}", self.runner.variant],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=PROJECT,
                env=os.environ | {"OMP_NUM_THREADS": str(self.job.threads), "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        return self._exchange(json.dumps(asdict(self.job)))

    def run(self) -> dict[str, Any]:
        """One run of the whole job: a `Run` and its seconds. Raises JobError."""
        return self._exchange("go")

    def stop(self) -> None:
        """Does nothing to a process that was not started or has ended."""
        if not hasattr(self, "_process"):
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.stdin.close()
            self._process.wait(PATIENCE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _exchange(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            last = next((text for text in reversed(self.log.read_text().splitlines()) if text.strip()), "nothing")
            raise JobError(
                f"{self.name} ended{self._how()}: it printed {last.strip()!r} last, the rest is in {self.log}"
            )
        found: dict[str, Any] = json.loads(answer)
        return found

    def _how(self) -> str:
        """What killed it, as far as that can be told."""
        with suppress(subprocess.TimeoutExpired):
            if self._process.wait(PATIENCE_S) == -signal.SIGKILL:
                return ", killed as the system does where memory runs out (all contenders are loaded at once)"
        return ""
