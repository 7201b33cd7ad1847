"""What names a run: a fingerprint of everything that decides its output. Resuming needs the same one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import engine
from engine import Schedule
from pipeline.config import JobConfig
from pipeline.errors import JobError
from pipeline.plan import Plan
from pipeline.storage import Storage

RUN_FILE = "_run.json"


def describe_run(config: JobConfig, plan: Plan, schedule: Schedule, model_identity: str) -> dict[str, Any]:
    """The parts of the fingerprint, in words a person can compare."""
    prompt_fields = ("text_column", "system", "prompt", "prompt_format", "max_prompt_tokens", "overlong")
    files = {file.path: [file.identity, file.rows] for file in plan.files}
    return {
        "model": [config.model, model_identity, config.dtype],
        "schedule": schedule.to_dict(),
        "sampling": config.sampling().to_dict(),
        "prompt": {name: getattr(config, name) for name in prompt_fields},
        "input": {"files": len(files), "digest": _digest(files), "rows": plan.rows, "kept": plan.kept.names},
        "rows_per_unit": config.rows_per_unit,
        "version": engine.__version__,
    }


def fingerprint(description: dict[str, Any]) -> str:
    """Name of a run, 16 hexadecimal digits."""
    return _digest(description)[:16]


def claim_output(storage: Storage, description: dict[str, Any]) -> bool:
    """Make the output this run's; True if it already was and the run resumes.

    Raises:
        JobError: the output belongs to another run; says what differs.
    """
    record = {"fingerprint": fingerprint(description), **description}
    if storage.write_if_absent(RUN_FILE, json.dumps(record, indent=1).encode()):
        return False
    existing = json.loads(storage.read(RUN_FILE) or b"{}")
    if existing.get("fingerprint") == record["fingerprint"]:
        return True
    changed = [part for part in description if existing.get(part) != json.loads(json.dumps(description[part]))]
    raise JobError(
        f"output {storage.url!r} belongs to run {existing.get('fingerprint')}, which differs in {', '.join(changed)}: "
        "name another output, or go back to that run's settings to resume it"
    )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
