"""vLLM on this machine's CPU, in this process. Only where it is installed: `make test-vllm`."""

from __future__ import annotations

import os

# Before vLLM is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",  # GB
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
    KMP_BLOCKTIME="0",  # as OMP_WAIT_POLICY, for Intel's threads
)
os.environ.setdefault("OMP_NUM_THREADS", "2")
