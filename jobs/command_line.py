"""A pydantic model as a command line: a kebab-case flag for every field, and --config for a YAML file of them."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource
from pydantic_settings.exceptions import SettingsError
from yaml import YAMLError

from engine import ModelError, ScheduleError
from pipeline.errors import JobError

Config = TypeVar("Config", bound=BaseModel)

USAGE_EXIT, FAILED_EXIT = 2, 1


def parse(config_class: type[Config], program: str, arguments: Sequence[str] | None = None) -> Config:
    """Read a configuration from --config and flags; flags win. Exits with code 2 and one line per mistake."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    # The file has to be known before the sources are put together.
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    file = before.parse_known_args(argv)[0].config

    class Command(config_class, BaseSettings):  # type: ignore[valid-type,misc]
        __doc__ = config_class.__doc__
        model_config = SettingsConfigDict(
            cli_parse_args=argv,
            cli_prog_name=program,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
            extra="forbid",
        )
        config: str | None = Field(None, description="YAML file with any of these options as keys; flags win over it")

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: PydanticBaseSettingsSource, **__: PydanticBaseSettingsSource
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            # No environment source: a variable called MODEL must not choose a model.
            return (YamlConfigSettingsSource(settings_cls, yaml_file=file),) if file else ()

    try:
        if file:
            open(file).close()  # the YAML source passes over a missing file in silence
        return config_class(**Command.model_validate({}).model_dump(exclude={"config"}))
    except ValidationError as error:
        mistakes = [_mistake(part) for part in error.errors()]
    except (OSError, SettingsError, YAMLError, TypeError) as error:
        mistakes = [f"--config {file!r} cannot be read: {error}" if file else str(error)]
    for mistake in mistakes:
        print(f"{program}: error: {mistake}", file=sys.stderr)
    print(f"try {program} --help", file=sys.stderr)
    raise SystemExit(USAGE_EXIT)


def log_to_stderr() -> None:
    """Our own progress, and other packages' warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    for package in ("engine", "pipeline", "jobs"):
        logging.getLogger(package).setLevel(logging.INFO)


def run(program: str, job: Callable[[], None]) -> int:
    """Exit code of a job: what a user has to change is one line, anything else keeps its traceback."""
    try:
        job()
    except (JobError, ModelError, ScheduleError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return FAILED_EXIT
    return 0


def _mistake(part: Any) -> str:
    name = "--" + ".".join(str(step) for step in part["loc"][:1]).replace("_", "-") if part["loc"] else ""
    if part["type"] == "missing":
        return f"{name} is required"
    if part["type"] == "extra_forbidden":
        return f"{name} is not an option"
    given = f", got {part['input']!r}" if name else ""
    return f"{name} {part['msg'].removeprefix('Value error, ')}{given}".strip()
