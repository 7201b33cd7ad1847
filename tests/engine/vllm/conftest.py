"""vLLM on this machine's CPU, in this process. Only where it is installed: `make test-vllm`."""

from __future__ import annotations

import os
from importlib.util import find_spec

spec = find_spec("vllm")
if spec is not None and spec.origin is not None:  # before it is imported
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",  # GB
        VLLM_LOGGING_LEVEL="WARNING",
        KMP_BLOCKTIME="0",  # what OMP_WAIT_POLICY is, for Intel's threads
    )
