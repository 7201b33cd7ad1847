"""What fixtures of `conftest.py` are."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from pipeline.config import JobConfig

Job = Callable[..., JobConfig]
ReadOutput = Callable[[str | Path], pa.Table]
WriteParquet = Callable[..., Path]
