"""Trials by seed, in processes of their own, for some may crash, hang or fill the memory.

A script of trials runs `run` over the seeds that it is given and prints one line of JSON for each; a test collects
these with `results`, which goes on behind a seed that ended its process.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MOST_S = 60  # for one trial
MOST_MIB = 1024  # for a process
AT_ONCE = 2
MOST_SAID = 2000  # characters

Result = dict[str, Any]


class _Tracebacks(logging.Handler):
    """What is logged with a traceback, or said by a thread that ended with one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.seen.append(f"logged: {record.getMessage()}")


def run(trial: Callable[[int], tuple[str, Callable[[], str]]]) -> None:
    """Of each seed from the first argument up to the second.

    `trial` gives the kind of damage, and what returns the sentence that it ends in, "" where nothing was to be found
    fault with, and raises where it should not.
    """
    tracebacks = _Tracebacks()
    logging.basicConfig(handlers=[tracebacks], level=logging.INFO, force=True)
    threading.excepthook = lambda args: tracebacks.seen.append(f"thread: {args.exc_value!r}")
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        tracebacks.seen.clear()
        kind, process = trial(seed)
        print(json.dumps({"seed": seed, "kind": kind}), flush=True)  # in case this is its last word
        signal.alarm(MOST_S)  # ends the process
        start, wrong, said = time.monotonic(), "", ""
        try:
            said = process()
            wrong = "".join(tracebacks.seen)
        except BaseException as error:
            wrong = f"{type(error).__name__}: {error}"[:MOST_SAID]
        signal.alarm(0)
        seconds, memory = time.monotonic() - start, _peak_mib()
        print(
            json.dumps({"seed": seed, "kind": kind, "said": said, "wrong": wrong, "s": seconds, "mib": memory}),
            flush=True,
        )


def _peak_mib() -> float:
    """Of this process; what getrusage says begins with the memory of the one that started it."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def sentence(said: object) -> str:
    text = str(said)
    assert "\n" not in text, text
    assert len(text) < MOST_SAID, text[:MOST_SAID]
    return text


def results(script: Path, first: int, end: int) -> list[Result]:
    """Of each seed; where a process crashes or hangs, the next goes on behind the seed that did it."""
    found: list[Result] = []
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/pipeline")))
    while first < end:
        job = subprocess.Popen(
            [sys.executable, str(script), str(first), str(end)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert job.stdout is not None
        last: Result = {"seed": first, "kind": "none yet"}
        for line in job.stdout:
            last = json.loads(line)
            if "s" in last:
                found.append(last)
        if job.wait() != 0:
            found.append({**last, "said": "", "wrong": f"ended with {job.returncode}", "s": 0.0, "mib": 0.0})
        first = last["seed"] + 1
    return found


def all_results(script: Path, how_many: int, at_a_time: int = 500) -> list[Result]:
    """Of so many seeds, on several processes."""
    starts = range(0, how_many, at_a_time)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        parts = pool.map(lambda start: results(script, start, min(how_many, start + at_a_time)), starts)
        return list(chain.from_iterable(parts))


def check(found: list[Result], how_many: int, what: str) -> int:
    """Print the figures; raises AssertionError for what went wrong. Returns how many were said to be damaged."""
    said = sum(bool(result["said"]) for result in found)
    seconds, memory = (max(result[key] for result in found) for key in ("s", "mib"))
    print(
        f"{len(found)} {what}: {said} said to be damaged, {len(found) - said} read, the longest {seconds:.1f} s, "
        f"all in {memory:.0f} MiB"
    )
    assert [result for result in found if result["wrong"] or result["mib"] > MOST_MIB] == []
    assert len(found) == how_many
    return said


def say_by(found: list[Result]) -> None:
    """Print figures by kind, less what was done to it."""
    groups: defaultdict[str, list[Result]] = defaultdict(list)
    for result in found:
        groups[result["kind"].split(", ")[0]].append(result)
    for name, group in sorted(groups.items()):
        said, seconds = sum(bool(result["said"]) for result in group), max(result["s"] for result in group)
        print(f"  {name}: {len(group)}, {said} said to be damaged, the longest {seconds:.1f} s")
