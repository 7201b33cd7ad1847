"""Which generations a data set keeps, and why it drops the others."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pipeline.dataset.config import DatasetConfig, FilterConfig, finder
from pipeline.dataset.json_filter import JsonFilter
from pipeline.reporting.text_metrics import repetition

Row = Mapping[str, Any]
REASONS = ("error", "finish_reason", "length", "pattern", "json_schema", "repetition", "duplicate")  # in order
FILTERED = ["generation", "finish_reason", "error"]  # columns that decide


class Filters:
    """Applied in order; the first that a row fails is counted. Duplicates come last: what was dropped is no original.

    Memory: 16 bytes and Python's overhead, about 100 bytes in all, for each row kept while duplicates are dropped.
    """

    def __init__(self, config: DatasetConfig) -> None:
        """Raises JobError if the JSON Schema cannot be used."""
        self.kept = 0
        self._dropped: Counter[str] = Counter()
        self._config = config
        self._seen: set[bytes] = set()
        self._require = finder(config.require_pattern) if config.require_pattern is not None else None
        self._forbid = finder(config.forbid_pattern) if config.forbid_pattern is not None else None
        self._is_valid = JsonFilter(config.json_schema) if config.json_schema is not None else None

    @property
    def described(self) -> dict[str, Any]:
        """All settings that decide what is kept; a JSON Schema by its content."""
        chosen = {name: getattr(self._config, name) for name in FilterConfig.model_fields}
        schema = self._is_valid.schema if self._is_valid is not None else None
        return {**chosen, "duplicates": self._config.duplicate_rule, "json_schema": schema}

    @property
    def dropped(self) -> dict[str, int]:
        """Rows by what spoke against them, in the order in which it is asked."""
        return {reason: self._dropped[reason] for reason in sorted(self._dropped, key=REASONS.index)}

    def reason_to_drop(self, row: Row) -> str | None:
        """What speaks against an output row, None if it is kept. Call it once per row: duplicates are remembered."""
        reason = self._reason(row)
        if reason is None:
            self.kept += 1
        else:
            self._dropped[reason] += 1
        return reason

    def _reason(self, row: Row) -> str | None:
        config, text = self._config, row["generation"]
        if row["error"] is not None or text is None:
            return "error"
        if row["finish_reason"] not in config.finish_reasons:
            return "finish_reason"
        if len(text.strip()) < config.min_chars or (config.max_chars is not None and len(text) > config.max_chars):
            return "length"
        if (self._require and not self._require(text)) or (self._forbid and self._forbid(text)):
            return "pattern"
        if self._is_valid is not None and not self._is_valid(text):
            return "json_schema"
        if config.max_repetition is not None and repetition(text) > config.max_repetition:
            return "repetition"
        return "duplicate" if self._is_repeated(text) else None

    def _is_repeated(self, text: str) -> bool:
        if self._config.duplicate_rule == "keep":
            return False
        same = " ".join(text.split()).casefold() if self._config.duplicate_rule == "normalized" else text
        digest = hashlib.blake2b(same.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            return True
        self._seen.add(digest)
        return False
