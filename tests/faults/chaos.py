"""Run jobs under random fault schedules until every one has finished, and prove each output.

python tests/faults/chaos.py --schedules 200 --seed 0

A schedule is decided by its seed: --schedules 1 --seed N plays that of a failure again. What a job does between two
requests is up to the machine, so a replay hits the same requests, not the same instants.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from fault_proxy import FaultProxy
from nodes import Nodes
from schedules import Schedule, random_schedule
from servers import S3Server
from trial import IMPORTS, Trial, kill_replicas

from jobs.command_line import FAILED_EXIT
from pipeline.errors import JobStopped

SESSION_LIMIT_S = 360.0  # what takes longer hangs
MOST_SESSIONS = 8
PACE_S = 0.05  # per batch, so that something is in flight when something dies


class Hang(Exception):
    """A session has outlasted its limit."""


class Chaos:
    """Plays schedules one after the other on one cluster and one server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = S3Server(folder / "s3")
        self._proxy = FaultProxy(self._server.url)
        self._nodes = Nodes({**self._server.environment, "PYTHONPATH": IMPORTS})
        self._driver: subprocess.Popen[str] | None = None
        self.figures = Counter[str]()

    def play(self, seed: int) -> str:
        """Schedule and outcome of one trial. Raises AssertionError for a wrong output, Hang."""
        calls = {
            "replica": kill_replicas,
            "node": self._nodes.kill_second,
            "server": self._restart_server,
            "driver": self._kill_driver,
        }
        schedule = random_schedule(seed, calls)
        print(schedule, flush=True)
        folder = self._folder / str(seed)
        folder.mkdir()
        rows = schedule.units * schedule.rows_per_unit
        trial = Trial(self._server, self._proxy, folder, rows, 1, schedule.special)
        self._proxy.arm(trial.name, list(schedule.faults))
        sessions = 0
        done = False
        while not done:
            sessions += 1
            assert sessions <= MOST_SESSIONS, f"not done after {MOST_SESSIONS} sessions"
            apart = schedule.racing or (schedule.kills_driver and sessions == 1)
            done = self._race(trial, schedule) if apart else self._session(trial, schedule)
        errors = {row: "its process died" if "KILL" in text else "ValueError" for row, text in schedule.special.items()}
        trial.check(errors)
        self._count(schedule, trial, sessions, rows)
        return f"{sessions} sessions, {rows} rows right"

    def close(self) -> None:
        self._nodes.close()
        self._proxy.close()
        self._server.stop()

    def _session(self, trial: Trial, schedule: Schedule) -> bool:
        """In this process; whether it finished the run."""
        try:
            with time_limit(SESSION_LIMIT_S):
                trial.run(PACE_S, **self._options(schedule))
        except JobStopped as stopped:
            print(f"  stopped: {stopped}", flush=True)
            return False
        return True

    def _race(self, trial: Trial, schedule: Schedule) -> bool:
        """In one process or two of their own; whether one of them finished the run."""
        options = {**self._options(schedule), "ray_address": self._nodes.address}
        drivers = [trial.start(PACE_S, **options) for _ in range(1 + schedule.racing)]
        self._driver = drivers[0]
        try:
            said = [driver.communicate(timeout=SESSION_LIMIT_S)[0] for driver in drivers]
        except subprocess.TimeoutExpired as error:
            said = [_said_until_killed(driver) for driver in drivers]
            raise Hang(f"a driver took more than {SESSION_LIMIT_S:.0f} s: {said}") from error
        finally:
            self._driver = None
            for driver in drivers:
                driver.kill()
        codes = [driver.returncode for driver in drivers]
        assert FAILED_EXIT not in codes, said
        print(f"  drivers ended with {codes}", flush=True)
        return 0 in codes

    def _options(self, schedule: Schedule) -> dict[str, object]:
        return {
            "rows_per_unit": schedule.rows_per_unit,
            "replicas": schedule.replicas,
            "threads_per_replica": 1,
            "batch_size": 4,
        }

    def _restart_server(self) -> None:
        self._server.kill()
        threading.Timer(1.0, self._server.start).start()

    def _kill_driver(self) -> None:
        if self._driver is not None:
            self._driver.kill()

    def _count(self, schedule: Schedule, trial: Trial, sessions: int, rows: int) -> None:
        self.figures["sessions"] += sessions
        self.figures["rows checked"] += rows
        self.figures["tokens of one pass"] += trial.tokens_of_one_pass
        self.figures["tokens generated"] += trial.tokens_generated
        for fault, victim in zip(schedule.faults, schedule.victims, strict=True):
            self.figures[f"hits: {victim or fault.action}"] += fault.hits


def _said_until_killed(driver: subprocess.Popen[str]) -> str:
    driver.kill()
    return driver.communicate()[0] if driver.stdout and not driver.stdout.closed else ""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"a session took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; each next one's is one more")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no schedule after this long")
    given = parser.parse_args()
    started = time.monotonic()
    outcomes = Counter[str]()
    failed: list[int] = []
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        chaos = Chaos(Path(folder))
        try:
            for seed in range(given.seed, given.seed + given.schedules):
                if time.monotonic() - started > given.minutes * 60:
                    break
                outcomes["schedules"] += 1
                begun = time.monotonic()
                try:
                    print(f"  {chaos.play(seed)} in {time.monotonic() - begun:.0f} s", flush=True)
                except Exception as error:
                    outcomes["hangs" if isinstance(error, Hang) else "wrong"] += 1
                    failed.append(seed)
                    print(f"FAILED: seed {seed}: {type(error).__name__}: {error}", flush=True)
                    traceback.print_exc()
        finally:
            with suppress(Exception):
                chaos.close()
    figures = {"seconds": round(time.monotonic() - started), **outcomes, **dict(sorted(chaos.figures.items()))}
    print(json.dumps({**figures, "failed seeds": failed}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
