"""vLLM on this machine's CPU, in this process. Only where it is installed: `make test-vllm`."""

import os
from importlib.util import find_spec
from typing import Any

import pytest

spec = find_spec("vllm")
if spec is not None and spec.origin is not None:  # before it is imported
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",  # GB
        VLLM_LOGGING_LEVEL="WARNING",
        KMP_BLOCKTIME="0",  # what OMP_WAIT_POLICY is, for Intel's threads
    )


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may prepare a pass while the one before runs, as on GPUs; on CPUs it sees no need for that."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def checked(platform: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(platform, config)
        config.scheduler_config.async_scheduling = wanted

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))
