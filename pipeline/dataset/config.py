"""The configuration of a data set generation."""

from collections.abc import Callable
from functools import cache
from typing import ClassVar, Literal, Self

import re2
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pipeline.config import JobConfig
from pipeline.rows.rows import SAMPLE
from pipeline.storage.settings import Place
from pipeline.storage.storage import Storage

GENERATION = "_generation"  # the run's own output, below the data set's directory
FOLDER, SPLIT = "data", "train"  # of its shards


class FilterConfig(BaseModel):
    """Which generations a data set keeps. A data set whose options here have changed is filtered again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    finish_reasons: list[Literal["stop", "length"]] = Field(
        ["stop", "length"], min_length=1, description="keep generations that ended so"
    )
    min_chars: int = Field(1, ge=0, description="drop shorter generations")
    max_chars: int | None = Field(None, ge=1, description="drop longer generations")
    require_pattern: str | None = Field(None, description="keep generations in which this RE2 expression is found")
    forbid_pattern: str | None = Field(None, description="drop generations in which this RE2 expression is found")
    json_schema: Place | None = Field(
        None, description="JSON Schema file on this machine: keep generations that are JSON and valid under it"
    )
    max_repetition: float | None = Field(
        None,
        ge=0,
        le=1,
        description="drop generations of whose runs of three words more than this share were in them already",
    )
    duplicates: Literal["keep", "exact", "normalized"] | None = Field(
        None,
        description="keep or drop repeated generations; normalized: case and white space make no difference; default "
        "normalized, but keep where the output answers requests",
    )

    @field_validator("require_pattern", "forbid_pattern")
    @classmethod
    def _is_pattern(cls, pattern: str | None) -> str | None:
        try:
            finder(pattern or "")
        except ValueError as error:
            raise ValueError(f"is no regular expression that can be used ({error})") from None
        return pattern

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"min_chars {self.min_chars} exceeds max_chars {self.max_chars}")
        return self


class DatasetConfig(JobConfig, FilterConfig):
    """Generate a data set: several samples per prompt, filtered, in shards that `datasets.load_dataset` reads."""

    reserved: ClassVar = (SAMPLE,)

    samples_per_prompt: int = Field(1, ge=1, le=1000, description="generations per row, each on a stream of its own")
    input_format: Literal["parquet", "openai-batch"] = Field(
        "parquet", description="openai-batch: a JSONL file of requests, whose parameters replace those given here"
    )
    output_format: Literal["parquet", "openai-batch"] = Field(
        "parquet", description="openai-batch: output.jsonl and errors.jsonl, a line for each request of such an input"
    )

    rows_per_shard: int = Field(50_000, ge=1, description="rows of a Parquet file of the data set, at the most")
    dataset_name: str | None = Field(None, description="title of the data set card; default the output's name")
    dataset_license: str | None = Field(None, description="licence for the card, a Hugging Face identifier")

    @property
    def duplicate_rule(self) -> str:
        """What is done with repeated generations. Two requests may well have the same answer."""
        return self.duplicates or ("keep" if self.output_format == "openai-batch" else "normalized")

    def storage_without_input(self) -> Storage:
        """That of the data set, where this configures the run below it. Requests lie there, as its input."""
        apart = f"/{GENERATION}" if self.input_format == "parquet" else ""
        return Storage(self.output.removesuffix(apart), self)

    @model_validator(mode="after")
    def _formats(self) -> Self:
        if self.output_format == "openai-batch" and self.input_format != "openai-batch":
            raise ValueError("output_format openai-batch answers requests: it needs input_format openai-batch")
        if self.incremental and self.input_format == "openai-batch":
            raise ValueError(
                "incremental looks for new Parquet files: requests of input_format openai-batch are one file"
            )
        if self.samples_per_prompt > 1 and not self.temperature and self.input_format == "parquet":
            raise ValueError("samples_per_prompt above 1 needs a temperature above 0: greedy samples are all the same")
        return self


@cache
def finder(pattern: str) -> Callable[[str], bool]:
    """Whether the pattern is found in a text. Raises ValueError, in a few words, for one that RE2 has not.

    Looking takes time that grows with the text alone: look-around and back-references are what takes other engines
    exponential time, and there are none. Perl's `\\w`, `\\d`, `\\s` and `\\b` mean ASCII; `\\pL` and `\\pN` are all
    letters and numbers.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except (re2.error, UnicodeError) as error:
        said = error.args[0] if error.args else error
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        raise ValueError(
            f"{said}; patterns are RE2's, without look-around and back-references, so that none takes forever"
        ) from None

    return lambda text: compiled.search(text.encode(errors="replace").decode()) is not None
