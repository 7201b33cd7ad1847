"""CUDA graphs: work recorded at its first run and replayed by one call from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """One graph for each key, all from one memory pool. Without CUDA, work simply runs.

    Graphs of one pool may overwrite each other's intermediate results, so work must leave what it computes in tensors
    that were there before.
    """

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._captures = device.type == "cuda"
        if self._captures:
            self._pool = torch.cuda.graph_pool_handle()
            self._side = torch.cuda.Stream(device)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run work once. The key must name everything that decides which kernels it starts, and their arguments."""
        if not self._captures:
            work()
        elif key in self._graphs:
            self._graphs[key].replay()
        else:
            self._warm_up(work)
            self._graphs[key] = self._capture(work)

    def _warm_up(self, work: Callable[[], None]) -> None:
        """The first run, on a stream of its own: it compiles kernels and makes library handles, as no capture may."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            work()
        current.wait_stream(self._side)

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record work without running it."""
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process, a replica's for instance, may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            work()
        return graph
