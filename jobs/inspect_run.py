"""Say how far the run in an output is, what it has cost, what failed and how to go on.

python jobs/inspect_run.py out/ --verify

Exit codes are those of the job: 0 done, 1 damaged or no run, 3 some units failed, 4 unfinished.
"""

import signal
import sys
from functools import partial

from pydantic import Field
from rich.console import Console

from jobs import command_line
from jobs.job_output import show
from pipeline import logs
from pipeline.commits.failed import failed_rows
from pipeline.dataset.config import GENERATION
from pipeline.dataset.generate import MANIFEST, damaged_files, unpublished
from pipeline.errors import JobError, JobStopped, counted
from pipeline.inspection import Inspection, inspect, verify
from pipeline.preparing.run_record import read_run, started_again
from pipeline.reporting.bill import bill
from pipeline.reporting.report import summary
from pipeline.storage.settings import Place, StorageConfig
from pipeline.storage.storage import Storage

PROGRAM = "inspect_run.py"
MOST_SHOWN = 10  # of failed units, and of damages


class InspectRun(StorageConfig):
    """Say how far the run in an output is, what it has cost, what failed and how to go on."""

    output: Place = Field(description="output of a job, or a data set: a local directory or any fsspec URL")
    verify: bool = Field(False, description="read every file: check sums, row counts, and that each row is there once")
    price_per_gpu_hour: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="what a GPU costs per hour; without GPUs, what a replica costs"
    )


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped as by Ctrl-C
    config = command_line.parse(InspectRun, PROGRAM, positional="output")
    logs.set_up("text")
    found: list[Inspection] = []
    code = command_line.run(PROGRAM, lambda: found.append(look(config)))
    if code or found[0].finished:
        return code
    return command_line.UNITS_FAILED_EXIT if found[0].lacks_only_failed else command_line.STOPPED_EXIT


def look(config: InspectRun) -> Inspection:
    """Print what stands in the output.

    Raises JobError if it holds no run or, with --verify, a damaged one; JobStopped if it is a data set that is not
    published as the run behind it has ended.
    """
    storage, data_set = outputs(config)
    found = inspect(storage)
    manifest = found.manifest if found.finished else None
    missing = unpublished(data_set, manifest) if data_set is not None and manifest is not None else ""
    say = partial(Console().print, soft_wrap=True, markup=False, highlight=False)
    say(f"{found.output}: {found.state}")
    totals = found.totals
    facts = {
        "run": str(found.run["fingerprint"]),
        "committed": f"{totals.rows:,} of {counted(found.rows, 'row')} in {counted(len(found.commits), 'unit')}",
        "failed": failed_rows(found.failed),
    }
    facts |= summary(totals, int(found.run["schedule"]["layers"])) | bill(config.price_per_gpu_hour, totals)
    show("", facts)
    for unit in found.failed[:MOST_SHOWN]:
        which = f"rows {unit.start} to {unit.start + unit.rows - 1} of" if unit.rows else "whole file"
        say(f"failed: {unit.unit}, {which} {unit.path}, {counted(unit.attempts, 'attempt')}: {unit.error}")
    if len(found.failed) > MOST_SHOWN:
        say(f"... and {len(found.failed) - MOST_SHOWN} more")
    if manifest is None or data_set is None:
        say(f"next: {found.advice}")
    elif not missing:
        say(f"next: read the files that {data_set.url.rstrip('/')}/{MANIFEST} lists")
    if config.verify:
        damages = verify(storage, found)
        for damage in damages[:MOST_SHOWN]:
            say(f"damaged: {damage}")
        if damages:
            raise JobError(
                f"{counted(len(damages), 'damage')} in {found.output!r}: delete the commits of the damaged units under "
                "_commits/ and the manifest, and start the job again to do just those, with their input files in place"
            )
        say(f"verified: {counted(len(found.commits), 'file')}, {counted(found.totals.rows, 'row')}, each once")
        if data_set is not None and not missing and (changed := damaged_files(data_set)):
            for file in changed[:MOST_SHOWN]:
                say(f"damaged: {file} is not what was published")
            raise JobError(
                f"the data set {config.output!r} has {counted(len(changed), 'damaged file')}: remove what is damaged, "
                "and start the same job again, which generates nothing anew"
            )
    if missing:
        raise JobStopped(
            f"data set {config.output!r}: {missing}; {started_again(found.run)}, which generates nothing anew"
        )
    return found


def outputs(config: InspectRun) -> tuple[Storage, Storage | None]:
    """That of the run: the output itself, or where it is a data set what lies in it; and then the data set's."""
    storage = Storage(config.output, config)
    below = Storage(f"{config.output.rstrip('/')}/{GENERATION}", config)
    no_run_here = read_run(storage.at_first()) is None
    return (below, storage) if no_run_here and read_run(below.at_first()) is not None else (storage, None)


if __name__ == "__main__":
    sys.exit(main())
