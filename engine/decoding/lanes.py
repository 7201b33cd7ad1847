"""Lanes: streams that take their rows from one queue, each computing its passes in a thread of its own.

The cores that work on one pass wait for each other at every product, hundreds of times in it, and idle while Python
prepares the next one. Two passes on a core each do neither.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

import torch

from engine.decoding.generation import Generation
from engine.decoding.stats import BatchStats
from engine.decoding.stream import Stream

ROWS = 16  # of a lane, at least: each lane reads all weights in each pass, and with fewer rows does little else
MOST = 8  # lanes: in more of them than that, Python is what the passes wait for


def lanes_for(device: torch.device, batch_size: int, samples_per_prompt: int) -> int:
    """How many lanes this thread's cores make for a batch; samples of one prompt stay together."""
    if device.type != "cpu":
        return 1
    return max(1, min(torch.get_num_threads(), batch_size // max(ROWS, samples_per_prompt), MOST))


class Lanes:
    """A stream made of several. Between steps lanes end the passes that they are in, and begin no others."""

    def __init__(self, streams: Sequence[Stream], samples_per_prompt: int) -> None:
        """Of streams that share their queue. Cores are those that torch uses in this thread, shared evenly."""
        self._streams, self._copies, self._threads = streams, samples_per_prompt, torch.get_num_threads()
        self._pool = ThreadPoolExecutor(len(streams), "lane")
        self._passes: dict[Future[list[Generation]], Stream] = {}
        self._stats = BatchStats()
        self.unfinished = 0  # rows queued or running

    def add(self, prompt: Sequence[int], sample_id: str, index: int) -> None:
        """As `Decoding.add`."""
        self._streams[0].add(prompt, sample_id, index)
        self.unfinished += self._copies

    def take_stats(self) -> BatchStats:
        """What passes have cost since this was last asked."""
        stats, self._stats = self._stats, BatchStats()
        return stats

    def step(self) -> list[Generation]:
        """At least one pass of a lane, where there are rows; the generations that ended."""
        self._begin()
        ended = wait(self._passes, return_when=FIRST_COMPLETED).done
        if any(each.exception() is not None for each in ended):
            self.close()  # who asks next finds nothing running, and its memory free
        done = []
        for each in ended:
            done += each.result()
            self._count(self._passes.pop(each))
        self.unfinished -= len(done)
        self._begin()
        return done

    def close(self) -> None:
        """Wait for the passes that run; no more begin."""
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)  # which threads to come would else have from a lane

    def _begin(self) -> None:
        """The next pass of every lane that is in none and has rows, or finds some."""
        busy = list(self._passes.values())
        active = [stream for stream in self._streams if stream in busy or stream.has_work]
        for index, stream in enumerate(active):  # when few are left, they have the cores of the others
            if stream not in busy:
                threads = self._threads // len(active) + (index < self._threads % len(active))
                self._passes[self._pool.submit(_step, stream, threads)] = stream

    def _count(self, stream: Stream) -> None:
        """Add a pass to the stats: its seconds are shared with the other lanes', its memory comes on top of theirs."""
        stats, busy, lanes = stream.take_stats(), self._passes.values(), 1 + len(self._passes)
        others = sum(s.held_bytes for s in self._streams if s is not stream and (s.rows or s in busy))
        self._stats += replace(
            stats,
            cache_course=tuple(held + others for held in stats.cache_course),
            prefill_seconds=stats.prefill_seconds / lanes,
            decode_seconds=stats.decode_seconds / lanes,
        )


def _step(stream: Stream, threads: int) -> list[Generation]:
    """A pass in this thread, on so many cores."""
    torch.set_num_threads(threads)
    return stream.step()
