"""The study: every contender on the same prompts, its outputs kept on disk so that nothing is computed twice."""

import hashlib
import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine import BatchStats, EarlyExit, Engine, Generation, Sampling, Schedule, check_is_file, parse_json
from pipeline.errors import JobError, one_line
from pipeline.evaluation.contender import Contender
from pipeline.monitoring.stage_progress import StageProgress
from pipeline.rows.rows import GENERATED, MEASURED
from pipeline.storage.records import Amount, Count, Record
from pipeline.values.row_groups import read_parquet

log = logging.getLogger(__name__)

TIMING = b"timing"  # key of the timing in a file's metadata

# Fields of a generation that are copied as they are.
COSTS = [name for name in MEASURED if name != "shared_prefix_tokens"]
OUTPUTS = pa.schema(
    [
        ("id", pa.string()),
        GENERATED.field("generation"),
        ("tokens", pa.list_(pa.int32())),
        *map(GENERATED.field, COSTS),
        # Teacher-forced on the row's full-depth answer, by decode step; null for adaptive rules.
        ("kl", pa.list_(pa.float32())),
        ("agrees", pa.list_(pa.bool_())),
        ("nll", pa.float64()),  # negative log-likelihood of the answer under full depth, over all its tokens, in nats
    ]
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A held-out row."""

    id: str
    text: str
    reference: str
    tokens: tuple[int, ...]
    read: str  # what the tokens say: text, instruction and system text, as the model reads them


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """How long one batch of prompts decoded under one contender."""

    session: str  # only times of one session compare
    decode_passes: Count
    decode_seconds: Amount


_TIMING: Record[BatchTiming] = Record(BatchTiming, "delete it")


@dataclass(frozen=True)
class Study:
    """Outputs under `directory`, one file per contender and batch of prompts.

    Full depth answers first, schedules share its prompt pass, and their teacher-forced scores are taken on its answers.
    """

    directory: Path
    model_identity: str
    sampling: Sampling
    batch_size: int
    prompts: Sequence[Prompt]

    def run(self, engine: Engine, contenders: Sequence[Contender]) -> None:
        """Compute what is missing. The first contender is full depth. Raises JobError: what is there is damaged."""
        session = uuid.uuid4().hex
        missing = [[c for c in contenders if not _is_there(self._file(c, batch))] for batch in self._batches()]
        left = sum(len(batch) * len(wanted) for batch, wanted in zip(self._batches(), missing, strict=True))
        all_of_them = len(self.prompts) * len(contenders)
        log.info(
            "%d prompts under %d contenders: %d of %d outputs are there already",
            len(self.prompts), len(contenders), all_of_them - left, all_of_them,
        )  # fmt: skip
        progress, done = StageProgress(log), 0
        if left:
            progress("computing outputs", 0, left)
        for batch, wanted in zip(self._batches(), missing, strict=True):
            for _ in self._run_batch(engine, batch, contenders[0], wanted, session):
                done += 1
                progress("computing outputs", done, left)

    def outputs(self, contender: Contender) -> pa.Table:
        """All of a contender's rows, in the prompts' order. Raises JobError."""
        return pa.concat_tables([self._read(contender, batch) for batch in self._batches()])

    def timings(self, contender: Contender) -> list[BatchTiming]:
        """One per batch of prompts."""
        return [_timing(self._file(contender, batch)) for batch in self._batches()]

    def _run_batch(
        self, engine: Engine, batch: Sequence[Prompt], full: Contender, missing: Sequence[Contender], session: str
    ) -> Iterator[None]:
        """Yields as answers come."""
        if not missing:
            return
        prompts, ids = [prompt.tokens for prompt in batch], [prompt.id for prompt in batch]
        scheduled = [(c, c.method) for c in missing if isinstance(c.method, Schedule)]
        schedules = [schedule for _, schedule in scheduled]
        seconds = [0.0] * len(schedules)
        generations: list[list[Generation]] = [[] for _ in schedules]

        def on_batch(index: int, stats: BatchStats) -> None:
            seconds[index] += stats.decode_seconds

        for index, generation in engine.generate_each(
            prompts, self.sampling, schedules, self.batch_size, ids, on_batch
        ):
            generations[index].append(generation)
            yield
        found: list[tuple[Contender, list[Generation], BatchTiming]] = []
        for (contender, _), each, time_taken in zip(scheduled, generations, seconds, strict=True):
            passes = sum(generation.generated_tokens - 1 for generation in each)
            found.append((contender, in_order(each), BatchTiming(session, passes, time_taken)))
        for contender in missing:
            if isinstance(contender.method, EarlyExit):
                each = []
                for generation in engine.generate_with_exits(
                    prompts, self.sampling, contender.method, self.batch_size, ids
                ):
                    each.append(generation)
                    yield
                found.append((contender, in_order(each), BatchTiming(session, 0, 0.0)))
        written = [[generation.tokens for generation in each] for _, each, _ in found]
        ours = int(full in missing)  # then full depth is the first
        answers = written[0] if ours else self._read(full, batch)["tokens"].to_pylist()
        scores, nll = engine.score(prompts, answers, schedules, written[ours:])
        for place, ((contender, each, timing), likely) in enumerate(zip(found, nll[1 - ours :], strict=True)):
            judged: list[dict[str, Any]] = [{"nll": one} for one in likely]
            for row, score in zip(judged, scores[place] if place < len(scores) else (), strict=False):
                row |= {"kl": list(score.kl), "agrees": list(score.agrees)}
            self._write(contender, batch, each, judged, timing)

    def _write(
        self,
        contender: Contender,
        batch: Sequence[Prompt],
        generations: Sequence[Generation],
        judged: Sequence[dict[str, Any]],
        timing: BatchTiming,
    ) -> None:
        records = [
            {
                "id": prompt.id,
                "generation": generation.text,
                "tokens": list(generation.tokens),
                **{name: getattr(generation, name) for name in COSTS},
                **scores,
            }
            for prompt, generation, scores in zip(batch, generations, judged, strict=True)
        ]
        table = pa.Table.from_pylist(records, OUTPUTS).replace_schema_metadata({TIMING: json.dumps(asdict(timing))})
        file = self._file(contender, batch)
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(".part")
        pq.write_table(table, scratch)
        scratch.replace(file)  # a whole file or none

    def _read(self, contender: Contender, batch: Sequence[Prompt]) -> pa.Table:
        """A contender's outputs. Raises JobError."""
        file = self._file(contender, batch)
        try:
            check_is_file(file)
            table = read_parquet(file)
            if table.schema.names != OUTPUTS.names or table["id"].to_pylist() != [prompt.id for prompt in batch]:
                raise ValueError("it holds other rows")
            return table.cast(OUTPUTS)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise _damaged(file, error) from error

    def _batches(self) -> list[Sequence[Prompt]]:
        firsts = range(0, len(self.prompts), self.batch_size)
        return [self.prompts[first : first + self.batch_size] for first in firsts]

    def _file(self, contender: Contender, batch: Sequence[Prompt]) -> Path:
        """Where a contender's outputs for a batch lie: the name holds all that decides them."""
        rows = [[prompt.id, list(prompt.tokens)] for prompt in batch]
        decided = json.dumps([OUTPUTS.names, self.model_identity, self.sampling.to_dict(), contender.identity, rows])
        name = hashlib.sha256(decided.encode()).hexdigest()[:16]
        return self.directory / contender.identity / f"{name}.parquet"  # whatever it is called today


def in_order(generations: Iterable[Generation]) -> list[Generation]:
    """As their prompts are."""
    return sorted(generations, key=lambda generation: generation.index)


def _is_there(file: Path) -> bool:
    """Raises JobError where it is damaged: better now than once all others are computed."""
    if not file.exists():
        return False
    _timing(file)
    return True


def _timing(file: Path) -> BatchTiming:
    """Of a file of outputs. Raises JobError."""
    try:
        check_is_file(file)
        return _TIMING.checked(parse_json((pq.read_schema(file).metadata or {}).get(TIMING, b"")))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> JobError:
    return JobError(f"the outputs {str(file)!r} are damaged ({one_line(error)}): delete it, and they are made anew")
