"""A job's driver as a process of its own, so that it can be killed, stopped and raced.

python driver.py '{"folder": "/scratch", "seconds_per_batch": 0.1, "job": {"input": ..., "output": ...}}'

With {"lease": {"LEASE_S": 9.0}} its lease has other times than the product's.
"""

from __future__ import annotations

import json
import sys

from counting_double import counting_backend

from jobs import command_line
from pipeline import lease, logs
from pipeline.config import JobConfig
from pipeline.run import run_job


def main() -> int:
    logs.set_up("text")
    # Imports take longer than the job: a driver may be started ahead, and is told what to do when it is wanted.
    told = json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.readline())
    config = JobConfig(**told["job"])
    for name, seconds in told.get("lease", {}).items():
        setattr(lease, name, seconds)
    backend = counting_backend(told["folder"], told["seconds_per_batch"])
    return command_line.run("driver.py", lambda: print(run_job(config, backend).totals.rows))


if __name__ == "__main__":
    sys.exit(main())
