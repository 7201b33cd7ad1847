"""All that is known of a run before a model is loaded."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import ModelShape, Schedule
from pipeline.commits.commit import SUCCESS_FILE
from pipeline.config import JobConfig
from pipeline.errors import JobError, NoFiles, NothingToDo
from pipeline.inputs.known_files import KnownFile, recall_files
from pipeline.inputs.work import Plan, make_plan
from pipeline.preparing.backend import Backend, ModelIdentity
from pipeline.preparing.fit import choose_schedule, longest_prompt, warn_of_another_model
from pipeline.preparing.run_record import as_recorded, begun_columns, describe_run, fingerprint, read_run
from pipeline.redaction import redacted
from pipeline.rows.rows import output_schema
from pipeline.rows.template import PromptTemplate
from pipeline.storage.ownership import Kind, check_files, check_place
from pipeline.storage.patterns import fixed_part
from pipeline.storage.storage import Storage, absolute

PACKAGES = "working_dir_files"  # where Ray unpacks the working directory of a submitted job, on each node


@dataclass(frozen=True)
class Preparation:
    """A run's settings, checked against each other, its input and its model."""

    config: JobConfig  # paths are absolute
    backend: Backend
    template: PromptTemplate
    plan: Plan
    shape: ModelShape
    schedule: Schedule
    longest_prompt: int
    description: dict[str, Any]  # for the run record
    model: ModelIdentity
    known: dict[str, KnownFile]  # what the output of an incremental run says of its input

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.description)


def prepare_run(config: JobConfig, backend: Backend | None = None) -> Preparation:
    """Raises JobError, ModelError, ScheduleError: input, model, schedule or columns do not fit."""
    backend = backend or Backend()
    config = absolute_paths(config)
    output, source = config.output_storage().at_first(), config.input_storage()
    check_place(output, Kind.RUN, source)
    if source.is_local and not config.fresh:
        config = as_recorded(output, config)
        source = config.input_storage()
    template = config.template()
    known: dict[str, KnownFile] | None = None
    if config.incremental:
        known = {} if config.fresh else recall_files(output, source)
    begun = None if config.fresh else begun_columns(output, config)
    try:
        plan = make_plan(config, template, known, begun.schema if begun is not None else None)
    except NoFiles:
        if known and _is_emptied(config, output, source):
            raise NothingToDo(f"nothing is new: {config.input!r} holds no files any more") from None
        raise
    check_files(config.storage_without_input(), source, (file.path for file in plan.files))
    output_schema(plan.kept, config.reserved)
    config = config.model_copy(update={"model": backend.pinned(config.model)})
    shape = backend.shape(config)
    schedule = choose_schedule(config, shape, config)
    longest = longest_prompt(config, shape)
    if config.system is not None and not config.model.endswith(".gguf"):  # which a tokenizer would have converted here
        template.shared_prefix(backend.tokenizer(config))  # some chat templates refuse a system text
    identity = backend.identity(config)
    warn_of_another_model(schedule, config.model, identity.digest)
    description = describe_run(config, plan, schedule, identity, begun)
    return Preparation(config, backend, template, plan, shape, schedule, longest, description, identity, known or {})


def _is_emptied(config: JobConfig, output: Storage, source: Storage) -> bool:
    """Whether an input without files is that of the finished run that is there; on a disk, its directory is left."""
    record = read_run(output)
    is_its = record is not None and record["input"].get("root") == redacted(config.input)
    finished = is_its and SUCCESS_FILE in output.entries()
    return finished and (not source.is_local or os.path.isdir(fixed_part(source.root)))


def absolute_paths(config: JobConfig) -> JobConfig:
    """The same configuration with paths that workers, whose directory is another, understand. Raises JobError."""
    paths = {"input": absolute(config.input), "output": absolute(config.output)}
    for name, path in paths.items():
        if "://" not in path and PACKAGES in Path(path).parts:
            raise JobError(
                f"{name} {getattr(config, name)!r} lies in the working directory that travels with a submitted job, a "
                "copy on each node: name a path that all nodes share, or a URL such as s3://"
            )
    return config.model_copy(update={**paths, "model": absolute_model(config.model)})


def absolute_model(model: str) -> str:
    """The same model by a name that workers understand: an absolute path where it is one."""
    if not os.path.exists(model):  # a Path raises for a name too long
        return model
    # Not what a file's link leads to: in the hub's cache that has another name.
    return os.path.realpath(model) if os.path.isdir(model) else os.path.abspath(model)
