"""Which texts are JSON and valid under a JSON Schema, all of whose references are found before any text is read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NoReturn

from jsonschema_rs import RegexOptions, ValidationError, ValidationErrorKind, Validator, validator_for

from engine import parse_json, read_json
from pipeline.errors import JobError, one_line
from pipeline.storage.records import LARGE

log = logging.getLogger(__name__)

MOST_SAID = 3  # texts on which validation itself fails


class JsonFilter:
    """Whether a text is JSON and valid under the schema in a file. Patterns take no longer than their text: they are
    Rust's, without look-around and back-references.

    What a validator cannot decide is not valid, and is said: no text may stop the filter of a run that is paid.
    """

    def __init__(self, path: str) -> None:
        """Raises JobError if the schema cannot be used: it is none, refers to what is not in it, or has a pattern that
        would not be in linear time.
        """
        self.schema = _read_schema(path)
        self._failed = 0
        try:
            self._validator: Validator = validator_for(
                self.schema, validate_formats=False, pattern_options=RegexOptions(), retriever=_fetch_nothing
            )
        except ValidationError as error:
            raise JobError(f"json_schema {path!r} {_wrong(error)}") from error
        except Exception as error:  # of the library, at whatever a file may hold
            raise JobError(f"json_schema {path!r} cannot be used ({one_line(error)}): rewrite it") from error

    def __call__(self, text: str) -> bool:
        try:
            value = parse_json(text)
        except ValueError:
            return False
        try:
            return self._validator.is_valid(value)
        except Exception as error:
            self._failed += 1
            if self._failed <= MOST_SAID:
                log.warning(
                    "a generation is dropped under json_schema, for it could not be validated (%s: %s): %.80r",
                    type(error).__name__, one_line(error), text,
                )  # fmt: skip
            return False


def _read_schema(path: str) -> Any:
    """The content of a schema file. Raises JobError."""
    try:
        return read_json(Path(path), LARGE)
    except (OSError, ValueError) as error:
        raise JobError(f"json_schema {path!r} is no JSON Schema ({one_line(error)}): repair it") from error


def _fetch_nothing(uri: str) -> NoReturn:
    """What a schema refers to elsewhere, which may be anywhere and another tomorrow."""
    raise ValueError("nothing is fetched")


def _wrong(error: ValidationError) -> str:
    """The rest of the sentence about a schema."""
    why = one_line(ValueError(error.message))
    if isinstance(error.kind, ValidationErrorKind.Referencing):
        return f"cannot be used ({why}): put what it refers to in its $defs"
    if isinstance(error.kind, ValidationErrorKind.Format) and error.kind.format == "regex":
        return f"cannot be used ({why} in linear time, which has no look-around and no back-references): rewrite it"
    return f"is no JSON Schema ({why}): repair it"
