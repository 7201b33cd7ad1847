"""How the benchmark and a contender talk: a line of JSON each way, over the contender's standard input and output.

    benchmark ─▶ {the job: prompts and settings}     contender ─▶ {"version", "load_seconds"} once it is loaded and warm
    benchmark ─▶ go                                  contender ─▶ {"seconds", "answers", ...}
    ...                                              until its input ends

Only Python's own library is needed here: peers live in environments of their own.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

WARM_UP = 4  # prompts that a contender answers before any clock runs

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Job:
    """What every contender is given."""

    model: str  # checkpoint directory
    prompts: list[list[int]]
    shared_prefix: list[int]  # what all prompts begin with
    new_tokens: int  # most that are generated for a prompt, greedily
    least_tokens: int  # before which no answer ends
    rows: int  # that may decode together
    eos: list[int]  # tokens that end an answer
    threads: int
    device: str  # "cpu" or "cuda"
    dtype: str  # as torch names it
    memory_share: float  # of a GPU's memory, for what keeps all that it is given
    random_weights: bool  # the checkpoint has none
    schedule: str | None  # directory
    scratch: str  # directory for what has to be converted


@dataclass(frozen=True)
class Run:
    """One run of the whole job; None: the contender can't tell."""

    answers: list[list[int]]  # for each prompt in turn, with or without the token that ended it
    prompt_seconds: float | None = None
    decode_seconds: float | None = None
    occupancy: float | None = None  # rows alive in decode passes / (rows that could be x passes)
    cache_course: list[int] | None = None  # bytes of keys and values in each pass


class Peer(ABC):
    """Made of a `Job` by loading the model."""

    version: str

    def renew(self) -> None:  # noqa: B027, most have nothing to forget
        """Forget what an earlier run computed; no clock runs."""

    @abstractmethod
    def answer(self, prompts: Prompts) -> Run:
        """The whole job on these prompts."""

    def prompt_seconds(self, prompts: Prompts) -> float | None:
        """How long the job takes with answers of one token, measured by one whose `Run` can't tell what prompts took:
        what the whole job takes beyond is decoding's then.
        """
        return None


def serve(load: Callable[[Job], Peer]) -> None:
    """Be a contender until standard input ends."""
    # What libraries print is not for the benchmark.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**what: object) -> None:
        print(json.dumps(what), file=channel, flush=True)

    job = Job(**json.loads(sys.stdin.readline()))
    start = time.perf_counter()
    contender = load(job)
    contender.answer(job.prompts[:WARM_UP])
    say(version=contender.version, load_seconds=time.perf_counter() - start)
    for _ in sys.stdin:
        contender.renew()
        start = time.perf_counter()
        run = contender.answer(job.prompts)
        seconds = time.perf_counter() - start
        if (prompt_seconds := contender.prompt_seconds(job.prompts)) is not None:
            run = replace(run, prompt_seconds=prompt_seconds, decode_seconds=seconds - prompt_seconds)
        say(seconds=seconds, **asdict(run))


def longest_first(prompts: Prompts) -> list[int]:
    """Indices of prompts, so that those of one length meet in one batch."""
    return sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
