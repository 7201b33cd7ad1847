"""A pydantic model as a command line: a kebab-case flag for every field, and --config for a YAML file of them.

pydantic-settings is no substitute: it splits a list's values at commas, so that the pattern a{1,3} becomes two, and
takes no list as `--target-speedups 1.25 1.65`.
"""

import argparse
import errno
import logging
import os
import re
import reprlib
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from engine import ModelError, PromptError, ScheduleError, brief
from pipeline import logs
from pipeline.errors import JobError, JobStopped, NothingToDo, UnitsFailed, one_line
from pipeline.redaction import redacted
from pipeline.rows.row_generator import is_out_of_memory

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=BaseModel)

MOST_CONFIG = 2**16  # characters; YAML takes a second for them
MOST_IGNORED = 3  # signals to end, while the process does
_SHORT = reprlib.Repr()  # of values given: YAML's aliases make gigabytes of little
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 300, 300
FAILED_EXIT, USAGE_EXIT, UNITS_FAILED_EXIT, STOPPED_EXIT = 1, 2, 3, 4
_FULL, _OUT_OF_REACH = (errno.ENOSPC, errno.EDQUOT), (errno.EROFS, errno.EACCES, errno.EIO)  # what a disk may say


def parse(
    config_class: type[Config], program: str, arguments: Sequence[str] | None = None, positional: str | None = None
) -> Config:
    """Read a configuration from --config and flags; flags win. Exits with code 2 and one line per mistake.

    One field may be positional: given by its place instead of by a flag.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may be no text
    parsed, unknown = _parser(config_class, program, positional).parse_known_args(arguments)
    given, options = vars(parsed), [_flag(field) for field in config_class.model_fields if field != positional]
    file = given.pop("config")
    mistakes = [_no_option(argument, ["--config", *options], positional) for argument in unknown]
    try:
        config = config_class(**{**(_read(file) if file else {}), **given})
        if not mistakes:
            return config
    except ValidationError as error:
        mistakes += [_mistake(part, options, positional) for part in error.errors()]
    except (OSError, ValueError, yaml.YAMLError) as error:
        mistakes += [f"--config {file!r} cannot be read: {one_line(error)}"]
    for mistake in mistakes:
        print(redacted(f"{program}: error: {mistake}"), file=sys.stderr)
    print(f"try {program} --help", file=sys.stderr)
    raise SystemExit(USAGE_EXIT)


def start(config_class: type[Config], program: str, job: Callable[[Config], None]) -> int:
    """Exit code of a job with the configuration that was given, which logs as that says."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a job as Ctrl-C does, whatever it is at
    config = parse(config_class, program)
    logs.set_up(getattr(config, "log_format", "text"))

    def then_end() -> None:
        try:
            job(config)
        finally:  # Ray takes seconds to end, in which a second Ctrl-C would crash it
            patience = iter(range(MOST_IGNORED))
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: None if next(patience, None) is not None else os._exit(STOPPED_EXIT))

    return run(program, then_end)


def run(program: str, job: Callable[[], None]) -> int:
    """Exit code of a job; what it ended with is one line, unless it is a defect, which keeps its traceback.

    0 done, or nothing to do; 1 something to change first; 3 some units failed, all others are done; 4 stopped, a rerun
    resumes.
    """
    try:
        job()
    except NothingToDo as reason:
        return _ended(program, f"nothing to do: {reason}", 0)
    except (JobError, ModelError, PromptError, ScheduleError, FloatingPointError) as error:
        return _ended(program, f"error: {error}", FAILED_EXIT)
    except UnitsFailed as error:
        return _ended(program, f"incomplete: {error}", UNITS_FAILED_EXIT)
    except JobStopped as error:
        return _ended(program, f"stopped: {error}", STOPPED_EXIT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would say so once more as it ends
        return _ended(program, "stopped: nobody reads what it prints any more; start it again", STOPPED_EXIT)
    except KeyboardInterrupt:
        return _ended(program, "stopped: interrupted; start it again", STOPPED_EXIT)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (*_FULL, *_OUT_OF_REACH):
            return _ended(program, f"stopped: {_disk(error)}", STOPPED_EXIT)
        if is_out_of_memory(error):
            way_out = "lower batch_size, or give it less at a time: fewer or shorter prompts, schedules one by one"
            return _ended(program, f"error: memory ran out ({one_line(error)}): {way_out}", FAILED_EXIT)
        if not logs.for_machines():
            raise
        log.exception("%s: defect", program, extra={"program": program, "exit_code": FAILED_EXIT})
        return FAILED_EXIT
    if logs.for_machines():
        return _ended(program, "done", 0)
    return 0


def _ended(program: str, how: str, code: int) -> int:
    if logs.for_machines():
        log.log(logging.ERROR if code else logging.INFO, how, extra={"program": program, "exit_code": code})
    else:
        print(redacted(f"{program}: {how}"), file=sys.stderr)
    return code


def _disk(error: OSError) -> str:
    """What a disk did not do, and the way out."""
    name = "a file" if error.filename is None else repr(str(error.filename))
    why = os.strerror(error.errno or 0)
    if error.errno in _FULL:
        return brief(f"{name} cannot be written ({why}): make room and start it again")
    return brief(f"{name} cannot be read or written ({why}): mend that and start it again")


def _parser(config_class: type[BaseModel], program: str, positional: str | None) -> argparse.ArgumentParser:
    """Flags are passed on as the strings they are: pydantic converts them."""
    usage = "%(prog)s [--config FILE] [OPTION ...]" + (f" {positional.upper()}" if positional else "")
    parser = argparse.ArgumentParser(program, usage=usage, description=config_class.__doc__, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with any of these options as keys; flags win over it"
    )
    # What the configuration is made of; a field is the last one's that has it.
    parts = [part for part in config_class.__mro__ if issubclass(part, BaseModel) and part is not BaseModel]
    groups: dict[type[BaseModel], Any] = {part: parser.add_argument_group(_title(part)) for part in parts[1:]}
    groups[config_class] = parser
    for name, field in config_class.model_fields.items():
        group = groups[[part for part in parts if name in part.model_fields][-1]]
        shown: dict[str, Any] = {"nargs": "*", "action": "extend"} if _is_list(field.annotation) else {}
        if choices := _choices(field.annotation):
            shown["metavar"] = "{" + ",".join(map(str, choices)) + "}"
        elif field.annotation is bool:
            shown["action"] = argparse.BooleanOptionalAction
        if name == positional:
            group.add_argument(name, nargs="?", default=argparse.SUPPRESS, metavar=name.upper(), help=_help(field))
        else:
            group.add_argument(_flag(name), dest=name, default=argparse.SUPPRESS, help=_help(field), **shown)
    return parser


def _title(part: type[BaseModel]) -> str:
    """The first sentence of what the class says that it is."""
    return " ".join(re.split(r"\.(?=\s|$)", part.__doc__ or part.__name__)[0].split())


def _no_option(argument: str, options: Sequence[str], positional: str | None) -> str:
    if not argument.startswith("--"):
        return f"{argument!r} belongs to no option"
    name = argument.split("=")[0]
    if positional is not None and name == _flag(positional):
        return f"{name} is not an option: give {positional.upper()} by its place, without a flag"
    nearest = get_close_matches(name, options, 1)
    return f"{name} is not an option" + (f": did you mean {nearest[0]}?" if nearest else "")


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Of an option that has few values, optional or not."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not NoneType]
        annotation = parts[0] if len(parts) == 1 else None
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _is_list(annotation: Any) -> bool:
    return any(get_origin(part) is list for part in (annotation, *getattr(annotation, "__args__", ())))


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if field.is_required():
        text += " (required)"
    elif field.default is not None and field.default is not PydanticUndefined:
        text += f" (default: {field.default})"
    return text.replace("%", "%%")


def _read(file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        raise FileNotFoundError("there is no such file")
    with Path(file).open(encoding="utf-8") as opened:
        text = opened.read(MOST_CONFIG + 1)
    if len(text) > MOST_CONFIG:
        raise ValueError(f"it has more than {MOST_CONFIG:,} characters")
    try:
        options = yaml.safe_load(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError("it is no mapping of options to values")
    fields: dict[str, Any] = {}
    for name, value in options.items():
        field = name.replace("-", "_")  # --help spells it with dashes
        if field in fields:
            raise ValueError(f"it gives {field} twice, spelt in two ways: take one of them out")
        fields[field] = value
    return fields


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _mistake(part: Any, options: Sequence[str], positional: str | None) -> str:
    field = str(part["loc"][0]) if part["loc"] else ""
    name = field.upper() if field == positional else _flag(field) if field else ""
    if part["type"] == "missing":
        return f"{name} is required"
    if part["type"] == "extra_forbidden":
        return _no_option(name, options, None)
    given = f", got {_SHORT.repr(part['input'])}" if name else ""
    if part["type"] == "list_type":
        given += ": a list is written [a, b] in YAML"
    return f"{name} {part['msg'].removeprefix('Value error, ')}{given}".strip()
