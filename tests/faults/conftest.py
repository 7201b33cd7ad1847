"""A job on an engine double, on a real S3 server behind a fault proxy, on a Ray cluster of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from servers import S3Server
from trial import Trial, local_ray


@pytest.fixture(scope="session")
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3.url)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def ray_node(s3: S3Server) -> Iterator[None]:
    """Ray inside this process; its workers reach the S3 server."""
    with local_ray(s3.environment):
        yield


@pytest.fixture
def trial(s3: S3Server, proxy: FaultProxy, tmp_path: Path) -> Trial:
    """An input of 24 rows in two files, on S3, and jobs of 4-row units over it."""
    return Trial(s3, proxy, tmp_path)
