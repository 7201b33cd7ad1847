"""Energy of a replica's GPUs, as NVIDIA's management library (NVML) counts it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pynvml
import ray

log = logging.getLogger(__name__)


class EnergyMeter:
    """Joules of some GPUs since their driver was loaded; always 0 where there are none, or none that count."""

    def __init__(self, gpus: Sequence[str], share: float = 1.0) -> None:
        """
        Args:
            gpus: each an index, or a UUID such as "GPU-..." or "MIG-...".
            share: of their energy that is counted, for a replica that has a fraction of a GPU.
        """
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
    def of_this_process(cls, gpus_per_replica: float | None) -> EnergyMeter:
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
