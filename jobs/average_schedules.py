"""Average several trainings of one schedule: at best closer to full depth than each of them, at the same FLOPs.

python jobs/average_schedules.py --schedules adapted/first adapted/second --output adapted/mean
"""

import logging
import sys
from dataclasses import replace

from pydantic import Field

from engine import Schedule, ScheduleError
from engine.adaptation.average import average
from jobs import command_line
from pipeline.preparing.fit import check_no_others, model_of, read_schedules
from pipeline.storage.ownership import claim_directory
from pipeline.storage.settings import Place, StorageConfig

PROGRAM = "average_schedules.py"

log = logging.getLogger("jobs.average_schedules")


class AverageSchedules(StorageConfig):
    """Average several trainings of one schedule: at best closer to full depth than each of them, at the same FLOPs."""

    schedules: list[Place] = Field(
        min_length=2,
        description="directories or URLs of trained schedules that began as one: the same layers skipped at the same "
        "steps, on prompts too; only what they learnt from, or in which order, may differ",
    )
    output: Place = Field(description="local directory for the averaged schedule")


def write_average(config: AverageSchedules) -> None:
    """Raises JobError, ScheduleError."""
    output = claim_directory(config.output, PROGRAM, sources=config.schedules)
    check_no_others(output, [""])
    trained = [_read_one(path, config) for path in config.schedules]
    first, *others = (dict(each.provenance) for each in trained)
    models = sorted({f"{name} ({identity[:8]})" for name, identity in filter(None, map(model_of, trained))})
    if len(models) > 1:
        raise ScheduleError(f"the schedules are of different models, or versions of one: {', '.join(models)}")
    first.pop("held_out", None)  # of one of them
    # Nothing that it has seen is to be taken for unseen.
    seen = [
        record
        for other in others
        for record in (other.get("adapted_on"), *other.get("adapted_before", []), other.get("calibrated_on"))
        if record not in (None, first.get("calibrated_on"))
    ]
    first["adapted_before"] = [*first.get("adapted_before", []), *seen]
    first["averaged"] = len(trained)
    replace(average(trained), provenance=first).write(output)
    log.info("written: the mean of %d schedules", len(trained))
    print(f"run it with --schedule {output}, judge it with evaluate_schedule.py --schedules {output}")


def _read_one(path: str, settings: StorageConfig) -> Schedule:
    """Raises JobError, ScheduleError, for a directory of several too."""
    found = read_schedules(path, settings)
    if "" not in found:
        raise ScheduleError(f"{path!r} holds several schedules ({', '.join(sorted(found))}): name one of them")
    return found[""]


if __name__ == "__main__":
    sys.exit(command_line.start(AverageSchedules, PROGRAM, write_average))
