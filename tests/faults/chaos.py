"""Run jobs under random fault schedules until every one has finished, and prove each output.

python tests/faults/chaos.py --schedules 200 --seed 0

A schedule is decided by its seed: --schedules 1 --seed N plays that of a failure again. What a job does between two
requests is up to the machine, so a replay hits the same requests, not the same instants.
"""

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
from functools import partial
from pathlib import Path
from types import FrameType

from driver import wrong_clock
from fault_proxy import Fault, FaultProxy
from nodes import Nodes
from schedules import FAR, FILES, FOREIGN_BESIDE, VICTIMS, Schedule, random_schedule
from servers import BUCKET, IMPORTS, S3Server
from trial import HARMS, Harmed, Trial, kill_replicas, tell, waiting_driver

from jobs.command_line import FAILED_EXIT, STOPPED_EXIT, UNITS_FAILED_EXIT
from pipeline.errors import JobError, JobStopped, NothingToDo, UnitsFailed
from pipeline.inputs.input_record import INPUT
from pipeline.inputs.known_files import INPUTS_FILE
from pipeline.storage import lease

SESSION_LIMIT_S = 360.0  # what takes longer hangs
MOST_SESSIONS = 10
PACE_S = 0.05  # per batch, so that something is in flight when something dies
LEASE = {"LEASE_S": 6.0, "RENEW_S": 1.0, "LOOK_S": 0.25}  # the product's times, divided by 20
AHEAD = 2  # drivers that wait for their job
LIVES = "is doing output"  # said by one that leaves the work to another
DONE, KILLED = 0, -signal.SIGKILL


class Hang(Exception):
    """A session has outlasted its limit."""


class Untrue(AssertionError):
    """An exit code that does not say how the job ended."""


class Chaos:
    """Plays schedules one after the other on one cluster and one server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = S3Server(folder / "s3")
        self._proxy = FaultProxy(self._server.url)
        self._nodes = Nodes({**self._server.environment, "PYTHONPATH": IMPORTS})
        self._waiting: list[subprocess.Popen[str]] = []
        self._drivers: list[subprocess.Popen[str]] = []
        self._trial: Trial | None = None
        self._swaps = 0  # of the input, in this trial
        self.figures = Counter[str]()
        self.kinds: dict[str, Counter[str]] = {}  # figures by kind of trial
        self.kind = Counter[str]()  # those of this one's

    def play(self, seed: int) -> str:
        """Schedule and outcome of one trial. Raises AssertionError for a wrong output, Hang."""
        calls = {
            "replica": kill_replicas,
            "node": self._nodes.kill_second,
            "server": self._restart_server,
            "driver": self._kill_driver,
            "input": self._replace_input,
        }
        schedule = random_schedule(seed, calls)
        print(schedule, flush=True)
        self.kind = self.kinds.setdefault(schedule.twist or "faults alone", Counter())
        folder = self._folder / str(seed)
        folder.mkdir()
        rows = schedule.units * schedule.rows_per_unit
        self._trial = trial = Trial(self._server, self._proxy, folder, rows, FILES, schedule.special)
        self._swaps = 0
        trial.lay_foreign_files(FOREIGN_BESIDE)
        if schedule.twist is not None and "no conditions" in schedule.twist:
            self._refused_without_conditions(trial, schedule)
        # What a run writes once, as soon as the output is its.
        lay = [
            Fault(f"PUT {name}", 1, "call after", call=partial(trial.lay_foreign_files, schedule.foreign))
            for name in (INPUT, INPUTS_FILE)
        ]
        self._proxy.arm(trial.name, [*schedule.faults, *lay])
        errors = {row: "its process died" if "KILL" in text else "ValueError" for row, text in schedule.special.items()}
        sessions = 0
        while not self._session(trial, schedule, sessions):
            sessions += 1
            if trial.published:
                trial.check(errors, of_any_version=True)
            assert sessions < MOST_SESSIONS, f"not done after {MOST_SESSIONS} sessions"
            if schedule.twist == "model replaced" and trial.begun:
                self._refuses_another_model(trial, schedule)
            if trial.version and not schedule.nightly:
                self._restore_input(trial, schedule)
        if schedule.nightly:
            trial.want_newest()
        trial.check(errors)
        if schedule.twist == "model replaced":
            self._refuses_another_model(trial, schedule)
            trial.check(errors)
        self._count(schedule, trial, sessions + 1, rows)
        return f"{sessions + 1} sessions, {rows} rows right"

    def close(self) -> None:
        for driver in self._waiting:
            driver.kill()
        self._nodes.close()
        self._proxy.close()
        self._server.stop()

    def _session(self, trial: Trial, schedule: Schedule, number: int) -> bool:
        """Whether it ended with every row published of the input as it is; what exit codes say is true."""
        swaps = self._swaps
        apart = schedule.racing or number < schedule.killed_drivers
        if apart:
            ended = self._race(trial, schedule, number)
        else:
            with wrong_clock(_wrong_by(schedule, number)):
                ended = [self._alone(trial, schedule)]
        if apart:
            print(f"  drivers ended with {[code for code, _ in ended]}", flush=True)
        for code, said in ended:
            if not (code in (DONE, STOPPED_EXIT, KILLED) or self._is_of_the_input(schedule, code, said)):
                raise Untrue(f"{code}: {said}")
        if schedule.nightly and self._swaps > swaps:
            return False  # the next night's
        done = [said for code, said in ended if code == DONE and LIVES not in said]
        alive = len(ended) > 1 and any(code in (KILLED, STOPPED_EXIT, UNITS_FAILED_EXIT) for code, _ in ended)
        if not (done or alive or all(code != DONE for code, _ in ended)):
            raise Untrue(f"left to nobody: {ended}")
        if done and not trial.published:
            raise Untrue(f"nothing is published: {ended}")
        return bool(done)

    def _alone(self, trial: Trial, schedule: Schedule, **options: object) -> tuple[int, str]:
        """In this process: exit code, and what it said at its end."""
        said = ""
        try:
            with time_limit(SESSION_LIMIT_S):
                trial.run(PACE_S, **{**self._options(schedule), **options})
        except NothingToDo as error:
            code, said = DONE, str(error)
        except JobStopped as error:
            code, said = STOPPED_EXIT, str(error)
        except UnitsFailed as error:
            code, said = UNITS_FAILED_EXIT, str(error)
        except JobError as error:
            code, said = FAILED_EXIT, str(error)
        else:
            code = DONE
        if said:
            print(f"  ended with {code}: {said[:300]}", flush=True)
        return code, said

    def _race(self, trial: Trial, schedule: Schedule, number: int) -> list[tuple[int, str]]:
        """In one process or two of their own: exit codes, and all that they said."""
        options = {**self._options(schedule), "ray_address": self._nodes.address}
        self._drivers = [self._driver() for _ in range(1 + schedule.racing)]
        for place, driver in enumerate(self._drivers):
            tell(driver, trial.order(PACE_S, LEASE, _wrong_by(schedule, number + place), **options))
        self._wait_ahead()
        try:
            said = [driver.communicate(timeout=SESSION_LIMIT_S)[0] for driver in self._drivers]
        except subprocess.TimeoutExpired as error:
            said = [_said_until_killed(driver) for driver in self._drivers]
            raise Hang(f"a driver took more than {SESSION_LIMIT_S:.0f} s: {said}") from error
        finally:
            ended, self._drivers = self._drivers, []
            for driver in ended:
                driver.kill()
        return list(zip([driver.returncode for driver in ended], said, strict=True))

    def _driver(self) -> subprocess.Popen[str]:
        self._wait_ahead()
        return self._waiting.pop(0)

    def _wait_ahead(self) -> None:
        while len(self._waiting) < AHEAD:
            self._waiting.append(waiting_driver(self._server))

    def _options(self, schedule: Schedule) -> dict[str, object]:
        return {
            "rows_per_unit": schedule.rows_per_unit,
            "replicas": schedule.replicas,
            "threads_per_replica": 1,
            "batch_size": 4,
            "incremental": schedule.nightly,
        }

    def _is_of_the_input(self, schedule: Schedule, code: int, said: str) -> bool:
        """Whether an exit code, 1 or 3, is what a replaced input file is to end with, and the file is named."""
        if not self._swaps:
            return False
        if code == UNITS_FAILED_EXIT:
            return "/in/0.parquet" in said
        return not schedule.nightly and "input file '0.parquet' has changed" in said

    def _refused_without_conditions(self, trial: Trial, schedule: Schedule) -> None:
        self._proxy.arm(trial.name)
        with self._proxy.ignoring_conditions(self._server.environment):
            code, said = self._alone(trial, schedule)
        if code != FAILED_EXIT or "cannot hold an output" not in said:
            raise Untrue(f"{code}: {said}")
        root = f"{BUCKET}/{trial.name}/out"
        assert [path for path in self._server.files.find(root) if path.rstrip("/") != root] == []
        self.figures["refused: no conditions"] += 1

    def _refuses_another_model(self, trial: Trial, schedule: Schedule) -> None:
        code, said = self._alone(trial, schedule, model="1")
        if not (code == STOPPED_EXIT or (code == FAILED_EXIT and "differs in model" in said)):
            raise Untrue(f"{code}: {said}")
        self.figures["refused: another model"] += code == FAILED_EXIT

    def _replace_input(self) -> None:
        assert self._trial is not None
        self._swaps += 1
        self._trial.replace_input()

    def _restore_input(self, trial: Trial, schedule: Schedule) -> None:
        """After a session that finds another input than it began with, unless it is put back meanwhile."""
        code, said = self._alone(trial, schedule)
        if not (code == STOPPED_EXIT or self._is_of_the_input(schedule, code, said) or not trial.version):
            raise Untrue(f"{code}: {said}")
        if trial.version:
            trial.replace_input()
        self.figures["refused: another input"] += code == FAILED_EXIT

    def _restart_server(self) -> bool:
        self._server.kill()
        threading.Timer(1.0, self._server.start).start()
        return True

    def _kill_driver(self) -> bool:
        """Whether there was one."""
        if not self._drivers or self._drivers[0].poll() is not None:
            return False
        self._drivers[0].kill()
        return True

    def _count(self, schedule: Schedule, trial: Trial, sessions: int, rows: int) -> None:
        self.figures["sessions"] += sessions
        self.figures["rows checked"] += rows
        self.figures["foreign files checked"] += trial.foreign_files
        self.figures["tokens of one pass"] += trial.tokens_of_one_pass
        self.figures["tokens generated"] += trial.tokens_generated
        self.kind["sessions"] += sessions
        self.kind["rows"] += rows
        self.kind["foreign files"] += trial.foreign_files
        for fault, victim in zip(schedule.faults, schedule.victims, strict=True):
            if victim in VICTIMS or fault.action.startswith("kill"):
                self.figures[f"killed: {victim or fault.action}"] += fault.killed
            else:
                self.figures[f"hits: {victim or fault.action}"] += fault.hits


def _wrong_by(schedule: Schedule, number: int) -> float:
    """Seconds by which a driver's clock is wrong, every other second."""
    if schedule.twist is None or "clock" not in schedule.twist:
        return 0.0
    return FAR[(schedule.seed + number) % len(FAR)]


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


def wrongs(error: Exception) -> Counter[str]:
    """What a failed trial adds to the figures."""
    if isinstance(error, Harmed):
        return error.counts
    kind = "hangs" if isinstance(error, Hang) else "exit codes untrue" if isinstance(error, Untrue) else "other"
    return Counter({kind: 1})


def table(kinds: dict[str, Counter[str]]) -> str:
    """A line of figures for each kind of trial, and their sums."""
    columns = ("trials", "seconds", "sessions", "rows", "foreign files", *HARMS, "exit codes untrue", "hangs", "other")
    lines = [*sorted(kinds.items()), ("all", sum(kinds.values(), Counter[str]()))]
    cells = [["", *columns], *([name, *(str(figures[column]) for column in columns)] for name, figures in lines)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns) + 1)]
    rows = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells]
    return "\n".join("  ".join(row) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; each next one's is one more")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no schedule after this long")
    given = parser.parse_args()
    started = time.monotonic()
    failed: list[int] = []
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        for name, seconds in LEASE.items():
            setattr(lease, name, seconds)
        chaos = Chaos(Path(folder))
        try:
            for seed in range(given.seed, given.seed + given.schedules):
                if time.monotonic() - started > given.minutes * 60:
                    break
                begun = time.monotonic()
                try:
                    print(f"  {chaos.play(seed)} in {time.monotonic() - begun:.0f} s", flush=True)
                except Exception as error:
                    chaos.kind += wrongs(error)
                    failed.append(seed)
                    print(f"FAILED: seed {seed}: {type(error).__name__}: {error}", flush=True)
                    traceback.print_exc()
                chaos.kind["trials"] += 1
                chaos.kind["seconds"] += round(time.monotonic() - begun)
        finally:
            with suppress(Exception):
                chaos.close()
    print(table(chaos.kinds))
    figures = {"seconds": round(time.monotonic() - started), **dict(sorted(chaos.figures.items()))}
    print(json.dumps({**figures, "failed seeds": failed}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
