"""A job on an engine double, on a real S3 server behind a fault proxy."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from servers import S3Server
from trial import Trial


@pytest.fixture(scope="session")
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3.url)
    yield proxy
    proxy.close()


@pytest.fixture
def trial(s3: S3Server, credentials: None, proxy: FaultProxy, tmp_path: Path) -> Iterator[Trial]:
    """An input of 24 rows in two files, on S3, and jobs of 4-row units over it."""
    trial = Trial(s3, proxy, tmp_path)
    yield trial
    trial.close()
