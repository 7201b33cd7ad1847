"""A job's driver as a process of its own, so that it can be killed, stopped and raced.

echo '{"folder": "/scratch", "seconds_per_batch": 0.1, "job": {"input": ..., "output": ...}}' | python driver.py

More keys: "model", which of the doubles; "lease", times of it other than the product's, {"LEASE_S": 9.0}; "clock_s", by
how much the clock is wrong, which it is set to and back from every second.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timedelta

from counting_double import counting_backend

from jobs import command_line
from pipeline import logs
from pipeline.config import JobConfig
from pipeline.preparing import run_record
from pipeline.run import run_job
from pipeline.storage import lease


def main() -> int:
    logs.set_up("text")
    # Imports take longer than the job: a driver may be started ahead, and is told what to do when it is wanted.
    told = json.loads(sys.stdin.readline())
    config = JobConfig(**told["job"])
    for name, seconds in told.get("lease", {}).items():
        setattr(lease, name, seconds)
    if told.get("clock_s"):
        set_clock(told["clock_s"])
    backend = counting_backend(told["folder"], told["seconds_per_batch"], told.get("model", "0"))
    return command_line.run("driver.py", lambda: print(run_job(config, backend).totals.rows))


def set_clock(seconds: float) -> None:
    """Let whatever of the product asks for the date be told a wrong one every other second.

    Not what signs requests: a server refuses those of a clock that is far from its own.
    """
    right = time.time

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(right()) + timedelta(seconds=seconds if int(right()) % 2 else 0)

    time.time = lambda: right() + (seconds if int(right()) % 2 else 0)
    run_record.datetime = Wrong  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
