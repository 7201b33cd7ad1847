"""A Ray head on free ports of this machine."""

from collections.abc import Iterator

import pytest
from servers import RayHead, S3Server


@pytest.fixture(scope="module")
def ray_head(s3: S3Server) -> Iterator[RayHead]:
    """One whose jobs have the S3 server's credentials."""
    head = RayHead(s3.environment)
    yield head
    head.stop()
