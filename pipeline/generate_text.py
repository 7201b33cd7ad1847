"""Generation as a plain callable, for users who have a data set of their own.

ds.map_batches(
    GenerateText,
    fn_constructor_kwargs={"prompt": "Summarise: {text}", "max_new_tokens": 64, "target_speedup": 1.1},
    batch_size=64, batch_format="pyarrow", compute=ray.data.ActorPoolStrategy(size=1),
)
"""

import hashlib
from typing import Any

import pyarrow as pa

from pipeline.config import GenerationConfig
from pipeline.errors import JobError
from pipeline.preparing.backend import Backend
from pipeline.preparing.fit import choose_schedule, longest_prompt
from pipeline.rows.row_generator import RowGenerator
from pipeline.rows.rows import TOKENS, generate, output_schema, prepare
from pipeline.values.show import names


class GenerateText:
    """Adds the output contract's columns to each batch of rows; a bad row becomes a row with `error`.

    Options are those of `GenerationConfig`. A row's random stream is named by its `id_column`, else by its prompt: rows
    of equal prompts then get equal samples.
    """

    def __init__(self, threads: int | None = None, backend: Backend | None = None, **options: Any) -> None:
        """Raises pydantic.ValidationError, JobError, ModelError or ScheduleError for options that do not fit."""
        config, backend = GenerationConfig(**options), backend or Backend()
        self._config = config
        self._template = config.template()
        shape = backend.shape(config)
        schedule = choose_schedule(config, shape)
        self._longest = longest_prompt(config, shape)
        self._tokenizer = backend.tokenizer(config)
        engine = backend.engine(config, threads)
        engine.share_prefix(self._template.shared_prefix(self._tokenizer))
        self._generator = RowGenerator(engine, config.sampling(), schedule, config.batch_size)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Raises JobError if the batch lacks the text column, the id column or a template field; TooManyRowsFailed."""
        config = self._config
        for name in filter(None, (config.text_column, config.id_column)):
            if name not in batch.column_names:
                raise JobError(f"the batch has no column {name!r}: it has {', '.join(batch.column_names)}")
        self._template.check_columns(set(batch.column_names))
        output_schema(batch.schema)
        prepared = prepare(batch, batch.schema, config.text_column, self._template, self._tokenizer, self._longest)
        ids = [hashlib.sha256(repr(tokens).encode()).hexdigest() for tokens in prepared[TOKENS].to_pylist()]
        if config.id_column is not None:
            ids = names(prepared[config.id_column], ids)
        return generate(prepared, ids, self._generator)
