"""A job's driver as a process of its own, so that it can be killed, stopped and raced.

echo '{"folder": "/scratch", "seconds_per_batch": 0.1, "job": {"input": ..., "output": ...}}' | python driver.py

More keys: "model", which of the doubles; "lease", times of it other than the product's, {"LEASE_S": 9.0}; "clock_s", by
how much the clock is wrong, which it is set to and back from every second.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import SimpleNamespace
from unittest.mock import patch

from counting_double import counting_backend

from engine.checkpoints import digests
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
    backend = counting_backend(told["folder"], told["seconds_per_batch"], told.get("model", "0"))
    with wrong_clock(told.get("clock_s", 0.0)):
        return command_line.run("driver.py", lambda: print(run_job(config, backend).totals.rows))


@contextmanager
def wrong_clock(seconds: float) -> Iterator[None]:
    """Whoever in the product asks for the date is told a wrong one every other second.

    Not what signs requests: a server refuses those of a clock that is far from its own.
    """

    def told() -> float:
        now = time.time()
        return now + (seconds if int(now) % 2 else 0)

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(told())

    if not seconds:
        yield
        return
    with patch.object(run_record, "datetime", Wrong), patch.object(digests, "time", SimpleNamespace(time=told)):
        yield


if __name__ == "__main__":
    sys.exit(main())
