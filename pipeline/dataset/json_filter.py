"""Which texts are JSON and valid under a JSON Schema, all of whose references are found before any text is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema import ValidationError
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from engine import parse_json, read_json
from pipeline.dataset.patterns import finder
from pipeline.errors import JobError, one_line
from pipeline.storage.records import LARGE

log = logging.getLogger(__name__)

MOST_SAID = 3  # texts on which validation itself fails
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def _read_schema(path: str) -> Any:
    """The content of a schema file. Raises JobError."""
    try:
        schema = read_json(Path(path), LARGE)
        if not isinstance(schema, dict | bool):
            raise ValueError("it is no object")
        return schema
    except (OSError, ValueError) as error:
        raise JobError(f"json_schema {path!r} is no JSON Schema ({one_line(error)}): repair it") from error


class JsonFilter:
    """Whether a text is JSON and valid under the schema in a file.

    What a validator cannot decide is not valid, and is said: no text may stop the filter of a run that is paid.
    """

    def __init__(self, path: str) -> None:
        """Raises JobError if the schema cannot be used: it is none, or refers to what is not in it, or has a pattern
        that RE2 has not, or never ends."""
        self.schema = _read_schema(path)
        self._failed = 0
        try:
            dialect = validator_for(self.schema, default=jsonschema.Draft202012Validator)
            dialect.check_schema(self.schema)
            _check(self.schema)
            self._validator = extend(dialect, KEYWORDS)(self.schema, registry=REGISTRY)
            for kind in ("null", "true", "0", "0.5", '""', "[]", "{}"):
                self._validator.is_valid(parse_json(kind))
        except jsonschema.SchemaError as error:
            why = one_line(ValueError(error.message))
            raise JobError(f"json_schema {path!r} is no JSON Schema ({why}): repair it") from error
        except RecursionError as error:
            why = "refers to itself without end: let it descend into the value"
            raise JobError(f"json_schema {path!r} {why}") from error
        except Exception as error:  # of libraries, at whatever a file may hold
            raise JobError(f"json_schema {path!r} cannot be used ({one_line(error)}): rewrite it") from error

    def __call__(self, text: str) -> bool:
        try:
            value = parse_json(text)
        except ValueError:
            return False
        try:
            return bool(self._validator.is_valid(value))
        except Exception as error:
            self._failed += 1
            if self._failed <= MOST_SAID:
                log.warning(
                    "a generation is dropped under json_schema, for it could not be validated (%s: %s): %.80r",
                    type(error).__name__, one_line(error), text,
                )  # fmt: skip
            return False


def _check(schema: Any) -> None:
    """Raises ValueError for a pattern of a schema, or of what it refers to, that RE2 has not, and for a reference that
    leads nowhere."""
    # What a reference leads to rarely names a dialect: it has that of the whole.
    dialect = DRAFT202012.detect(schema)
    resource = dialect.create_resource(schema)
    base = resource.id() or ""
    registry: Registry[Any] = REGISTRY.with_resource(base, resource).crawl()
    left, seen, keywords = [(resource, registry.resolver(base))], set(), set[str]()
    while left:
        resource, resolver = left.pop()
        contents = resource.contents
        if id(contents) in seen or not isinstance(contents, Mapping):
            continue
        seen.add(id(contents))
        keywords |= contents.keys()
        patterns = [contents["pattern"]] if isinstance(contents.get("pattern"), str) else []
        for expression in [*patterns, *(contents.get("patternProperties") or ())]:
            finder(expression)
        for reference in (str(contents[name]) for name in REFERENCES if name in contents):
            try:
                found = resolver.lookup(reference)
            except Unresolvable:
                raise ValueError(
                    f"reference {reference!r} leads to nothing in the file, and nothing is fetched: put what it means "
                    "in $defs"
                ) from None
            left.append((Resource.from_contents(found.contents, default_specification=dialect), found.resolver))
        left += [(part, resolver.in_subresource(part)) for part in resource.subresources()]
    if {"patternProperties", "unevaluatedProperties"} <= keywords:
        raise ValueError("patternProperties together with unevaluatedProperties is not supported")


def _pattern(validator: Any, wanted: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(value, "string") and not finder(wanted)(value):
        yield ValidationError(f"{value!r} does not match {wanted!r}")


def _pattern_properties(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    for name, item in value.items() if validator.is_type(value, "object") else ():
        for expression, part in wanted.items():
            if finder(expression)(name):
                yield from validator.descend(item, part, path=name, schema_path=expression)


def _additional_properties(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    named, expressions = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in value.items() if validator.is_type(value, "object") else ():
        if name not in named and not any(finder(expression)(name) for expression in expressions):
            yield from validator.descend(item, wanted, path=name)


def _multiple_of(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    # As decimal numbers, which is what stands in the text: 0.07 is a multiple of 0.01.
    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(wanted)):
        yield ValidationError(f"{value!r} is not a multiple of {wanted}")


# Their own implementation may take forever or fail.
KEYWORDS = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "multipleOf": _multiple_of,
}
