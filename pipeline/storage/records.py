"""The one reader of the JSON records of an output: what it returns is as its type says; all else is said to be damaged.

Checked are, in this order, the size, before it is read; that it is JSON as RFC 8259 has it, so no NaN and no Infinity,
nesting and number of values bounded; then fields, types, and that names stay inside the output. A field that a type
does not know is ignored: a newer version may have written it.
"""

from functools import cached_property
from typing import Annotated, Any, Generic, TypeVar

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic's demand before Python 3.12

from engine import parse_json
from pipeline.errors import JobError, one_line
from pipeline.storage.storage import Storage
from pipeline.storage.stores import Unfit

T = TypeVar("T")

SMALL, LARGE = 2**20, 2**27  # bytes: of a record of one thing, of one that lists many

UnitName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,200}\z")]
DataFile = Annotated[str, StringConstraints(pattern=r"^data/[A-Za-z0-9_-]{1,240}\.parquet\z")]
PublishedFile = Annotated[
    str, StringConstraints(pattern=r"^(data/[A-Za-z0-9_-]{1,240}\.parquet|(output|errors)\.jsonl)\z")
]
Fingerprint = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}\z")]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Flops = Annotated[int, Field(ge=0, le=10**27)]
Amount = Annotated[float, Field(ge=0, le=1e27)]


class OpenRecord(TypedDict):
    """Fields that a type does not know are kept."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]


class RecordDamaged(JobError):
    """A record of an output is not what it should be."""


class Record(Generic[T]):
    """A kind of record: how it is read back."""

    def __init__(self, type_: Any, way_out: str, limit: int = SMALL) -> None:
        """`way_out` ends the sentence that says of one that it is damaged."""
        self._type = type_
        self._way_out = way_out
        self._limit = limit

    def read(self, storage: Storage, name: str) -> T | None:
        """None if there is none. Raises RecordDamaged; StorageGone, StorageRefused."""
        try:
            content = storage.read(name, self._limit)
        except Unfit as error:
            raise self.damaged(storage, name, one_line(error)) from error
        try:
            return None if content is None else self.checked(parse_json(content))
        except ValueError as error:
            raise self.damaged(storage, name, one_line(error)) from error

    def sound(self, storage: Storage, name: str) -> T | None:
        """As `read`, None for a damaged one too."""
        try:
            return self.read(storage, name)
        except RecordDamaged:
            return None

    def checked(self, value: Any) -> T:
        """A parsed record as its type. Raises ValueError, in a few words."""
        try:
            checked: T = self._adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part)[:60] for part in first["loc"])
            said = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{where}: {said}" if where else said) from None
        return checked

    def damaged(self, storage: Storage, name: str, why: str) -> RecordDamaged:
        return RecordDamaged(f"{name} of {storage.url!r} is damaged ({why}): {self._way_out}")

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self._type)
