"""Which texts are JSON and valid under a JSON Schema, all of whose references are found before any text is read."""

import json
import logging
from pathlib import Path
from typing import Any, NoReturn

import jsonschema_rs

from engine import parse_json, read_json
from pipeline.errors import JobError, described, one_line
from pipeline.storage.records import LARGE

log = logging.getLogger(__name__)

MOST_SAID = 3  # texts on which validation itself fails
IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")  # keywords of schemas for the same value


class JsonFilter:
    """Whether a text is JSON and valid under the schema in a file. Patterns take no longer than their text: they are
    Rust's, without look-around and back-references.

    What a validator cannot decide is not valid, and is said: no text may stop the filter of a run that is paid.
    """

    def __init__(self, path: str) -> None:
        """Raises JobError if the schema cannot be used: it is none, refers to what is not in it, or has a pattern that
        would not be in linear time, or never ends.
        """
        self.schema = _read_schema(path)
        self._failed = 0
        try:
            self._validator: jsonschema_rs.Validator = jsonschema_rs.validator_for(
                self.schema,
                validate_formats=False,
                pattern_options=jsonschema_rs.RegexOptions(),
                retriever=_fetch_nothing,
            )
            named = self.schema.get("$id") if isinstance(self.schema, dict) else None
            base = str(named or "urn:schema").removesuffix("#")
            resolver = jsonschema_rs.Registry([(base, self.schema)]).resolver(base)
            endless = _never_ends(self.schema, resolver, [self.schema], [])
        except jsonschema_rs.ValidationError as error:
            raise JobError(f"json_schema {path!r} {_wrong(error)}") from error
        except Exception as error:  # of the library, at whatever a file may hold
            raise JobError(f"json_schema {path!r} cannot be used ({one_line(error)}): rewrite it") from error
        if endless:
            raise JobError(f"json_schema {path!r} refers to itself without end: let it descend into the value")

    def __call__(self, text: str) -> bool:
        try:
            value = parse_json(text)
        except ValueError:
            return False
        try:
            try:
                return self._validator.is_valid(value)
            except UnicodeEncodeError:  # half a surrogate pair, which JSON can name and Unicode has not
                said = json.dumps(value, ensure_ascii=False).encode(errors="replace")  # with a question mark for it
                return self._validator.is_valid(json.loads(said))
        except Exception as error:
            self._failed += 1
            if self._failed <= MOST_SAID:
                log.warning(
                    "a generation is dropped under json_schema, for it could not be validated (%s): %.80r",
                    described(error), text,
                )  # fmt: skip
            return False


def _read_schema(path: str) -> Any:
    """The content of a schema file. Raises JobError."""
    try:
        return read_json(Path(path), LARGE)
    except OSError as error:
        said = one_line(error)
        raise JobError(
            f"json_schema {path!r} cannot be read ({said}): name a file on this machine that holds the schema"
        ) from error
    except ValueError as error:
        raise JobError(f"json_schema {path!r} is no JSON Schema ({one_line(error)}): repair it") from error


def _never_ends(part: Any, resolver: jsonschema_rs.Resolver, chain: list[Any], done: list[Any]) -> bool:
    """Whether references lead a schema back to itself at the same value.

    `chain` are those that lead here, `done` those that were found to end.
    """
    if not isinstance(part, dict) or part in done:
        return False
    if isinstance(part.get("$id"), str) and chain != [part]:
        return False  # a schema with a base of its own, against which the validator has resolved its references
    if isinstance(reference := part.get("$ref"), str):
        found = resolver.lookup(reference)
        again = found.contents in chain
        if again or _never_ends(found.contents, found.resolver, [*chain, found.contents], done):
            return True
    values = [part[name] for name in IN_PLACE if name in part]
    inner = [each for value in values for each in (value if isinstance(value, list) else [value])]
    if any(_never_ends(each, resolver, chain, done) for each in inner):
        return True
    done.append(part)
    return False


def _fetch_nothing(uri: str) -> NoReturn:
    """What a schema refers to elsewhere, which may be anywhere and another tomorrow."""
    raise ValueError("nothing is fetched")


def _wrong(error: jsonschema_rs.ValidationError) -> str:
    """The rest of the sentence about a schema."""
    why = one_line(ValueError(error.message))
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Referencing):
        return f"cannot be used ({why}): put what it refers to in its $defs"
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Format) and error.kind.format == "regex":
        return f"cannot be used ({why} in linear time, which has no look-around and no back-references): rewrite it"
    return f"is no JSON Schema ({why}): repair it"
