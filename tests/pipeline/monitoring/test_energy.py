"""Energy: what NVML counts, of a replica's own GPUs; nothing where there is none. Its library is stood in for."""

import pynvml
import pytest

from pipeline.monitoring.spending import EnergyMeter, Spending


class Library:
    """NVML of a machine with two GPUs."""

    def __init__(self) -> None:
        self.millijoules = {"0": 1_000, "1": 50_000, "GPU-b": 50_000}
        self.broken = False

    def count(self, device: str) -> int:
        if self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.millijoules[device]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", str)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", str)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", library.count)
    return library


@pytest.mark.parametrize(
    ("gpus", "share", "joules"), [(["1"], 1.0, 2.0), (["GPU-b"], 1.0, 2.0), (["0", "1"], 1.0, 5.0), (["1"], 0.25, 0.5)]
)
def test_joules_are_those_of_the_gpus_named(library: Library, gpus: list[str], share: float, joules: float) -> None:
    meter = EnergyMeter(gpus, share)
    before = meter.joules()
    library.millijoules = {"0": 4_000, "1": 52_000, "GPU-b": 52_000}
    assert meter.joules() - before == pytest.approx(joules)


def test_a_gpu_that_is_lost_counts_nothing_and_stops_nobody(library: Library) -> None:
    meter = EnergyMeter(["1"])
    assert meter.joules() == 50.0
    library.broken = True
    assert meter.joules() == 0.0


def test_gpus_that_nothing_counts_cost_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """For real: with no driver on this machine, or no GPU of this name."""
    with caplog.at_level("INFO"):
        assert EnergyMeter(["GPU-00000000-0000-0000-0000-000000000000"]).joules() == 0.0
    assert "energy of GPUs GPU-0000" in caplog.text


def test_without_gpus_there_is_nothing_to_count() -> None:
    assert EnergyMeter([]).joules() == 0.0


def test_units_under_way_at_once_share_what_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("pipeline.monitoring.spending.time.perf_counter", lambda: now[0])
    spending = Spending(lambda: 10 * now[0])
    with spending.shared() as one:
        now[0] = 2.0
        with spending.shared() as other:
            now[0] = 6.0
        now[0] = 7.0
    assert (one.seconds, other.seconds, one.joules, other.joules) == (5.0, 2.0, 50.0, 20.0)
