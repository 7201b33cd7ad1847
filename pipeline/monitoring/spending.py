"""What a process spends, in time and energy, shared by the units that it has under way."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self

import pynvml
import ray

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Share:
    """Of one unit."""

    seconds: float = 0.0
    joules: float = 0.0


class Spending:
    """Seconds and joules while a unit is under way, in equal shares with those that are at the same time."""

    def __init__(self, joules: Callable[[], float]) -> None:
        """`joules` counts up."""
        self._joules = joules
        self._lock = Lock()
        self._shares: list[Share] = []
        self._seconds_then = self._joules_then = 0.0

    @contextmanager
    def shared(self) -> Iterator[Share]:
        """A unit is under way; its share is whole at the end."""
        with self._lock:
            self._spend()
            self._shares.append(share := Share())
        try:
            yield share
        finally:
            with self._lock:
                self._spend()
                self._shares.remove(share)

    def _spend(self) -> None:
        now, joules = time.perf_counter(), self._joules()
        for share in self._shares:
            share.seconds += (now - self._seconds_then) / len(self._shares)
            share.joules += max(0.0, joules - self._joules_then) / len(self._shares)
        self._seconds_then, self._joules_then = now, joules


class EnergyMeter:
    """Joules of some GPUs since their driver was loaded, as NVIDIA's management library (NVML) counts them.

    Always 0 where there are none, or none that count.
    """

    def __init__(self, gpus: Sequence[str], share: float = 1.0) -> None:
        """GPUs by index or UUID, such as "GPU-..." or "MIG-..."; of a GPU a replica may have a `share`."""
        self._share = share
        self._devices: list[Any] = []
        if not gpus:
            return
        try:
            pynvml.nvmlInit()
            devices = [_device(gpu) for gpu in gpus]
            for device in devices:
                pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
            self._devices = devices
        except pynvml.NVMLError as error:
            log.info("the energy of GPUs %s is not counted: %s", ", ".join(gpus), error)

    @classmethod
    def of_this_process(cls, gpus_per_replica: float | None) -> Self:
        """Of the GPUs that Ray gave it."""
        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return cls([str(gpu) for gpu in ids], min(1.0, gpus_per_replica or 1.0))

    def joules(self) -> float:
        """Its difference is what was used in between. A device that fails to answer counts nothing."""
        try:
            # The library counts millijoules, on Volta and later.
            counts = [pynvml.nvmlDeviceGetTotalEnergyConsumption(device) for device in self._devices]
        except pynvml.NVMLError:
            self._devices = []
            return 0.0
        return float(self._share * sum(counts) / 1000)


def _device(gpu: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(gpu)
