"""The job on Ray Data."""

import os

# Ray Data shares a cluster among the jobs it knows, and one whose driver was killed is known for so many seconds: three
# minutes by default, in which the next job may have no core to commit on. It asks when it is imported.
os.environ.setdefault("RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S", "30")
