"""What Ray Data is told before it is imported."""

import subprocess
import sys

ASK = """
from pipeline.run import run_job
from ray.data._internal.cluster_autoscaler import RateBasedClusterAutoscaler
print(RateBasedClusterAutoscaler.AUTOSCALING_REQUEST_EXPIRE_TIME_S)
"""


def test_a_killed_driver_holds_its_share_of_the_cluster_for_seconds() -> None:
    said = subprocess.run([sys.executable, "-c", ASK], check=True, capture_output=True, text=True).stdout
    assert int(said) <= 30
