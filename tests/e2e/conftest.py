"""A Ray head on free ports of this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from ray.exceptions import RayError
from ray.job_submission import JobSubmissionClient
from servers import SCRIPTS, S3Server, free_ports, stop, wait_until


@dataclass(frozen=True)
class RayHead:
    """A running Ray head."""

    dashboard: str
    metrics: str  # what Prometheus would scrape
    environment: dict[str, str]


@pytest.fixture(scope="session")
def ray_head(s3: S3Server) -> Iterator[RayHead]:
    """A Ray head with two cores, token authentication and the S3 server's credentials."""
    port, dashboard, client, metrics, agent = free_ports(5)
    # Short: the paths of Ray's sockets have a limit.
    scratch = tempfile.mkdtemp(prefix="ray")
    environment = {
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        **s3.environment,
    }
    command = [
        str(SCRIPTS / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}",
        f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}", "--num-cpus=2",
        f"--metrics-export-port={metrics}", f"--dashboard-agent-listen-port={agent}",
        f"--object-store-memory={300 << 20}", f"--temp-dir={scratch}", "--disable-usage-stats",
    ]  # fmt: skip
    server = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{dashboard}"

    headers = {"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"}

    def takes_jobs() -> bool:
        try:
            JobSubmissionClient(url, headers=headers).submit_job(entrypoint="true")
        except (ConnectionError, RuntimeError, RayError):  # the dashboard is up before the agent that starts jobs
            return False
        return True

    try:
        wait_until(takes_jobs, "the start of the Ray head", limit_s=120)
        yield RayHead(url, f"http://127.0.0.1:{metrics}/metrics", environment)
    finally:
        stop(server)
        shutil.rmtree(scratch, ignore_errors=True)
