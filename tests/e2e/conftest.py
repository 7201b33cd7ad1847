"""Real servers on free ports of this machine: an S3 server and a Ray head."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import s3fs
from ray.exceptions import RayError
from ray.job_submission import JobSubmissionClient

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
START_S, STOP_S = 60, 5


@dataclass(frozen=True)
class S3:
    """A running S3 server and the environment that leads to it."""

    environment: dict[str, str]
    files: s3fs.S3FileSystem


@dataclass(frozen=True)
class RayHead:
    """A running Ray head."""

    dashboard: str
    environment: dict[str, str]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for open_socket in sockets:
            open_socket.bind(("127.0.0.1", 0))
        return [int(open_socket.getsockname()[1]) for open_socket in sockets]
    finally:
        for open_socket in sockets:
            open_socket.close()


def wait_until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if ready():
            return
        time.sleep(0.2)
    raise TimeoutError(f"{what} did not start within {START_S} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process group to end, then make it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(STOP_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """SeaweedFS with a bucket named "corpus"."""
    port, master, volume, filer, admin = free_ports(5)
    environment = {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16),
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
    }
    ports = {"s3": port, "master": master, "volume": volume, "filer": filer, "admin": admin}
    command = [
        str(SCRIPTS / "weed"), "mini", f"-dir={tmp_path_factory.mktemp('s3')}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{name}.port={number}" for name, number in ports.items()),
    ]  # fmt: skip
    log = (tmp_path_factory.mktemp("log") / "weed.log").open("wb")
    server = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True)
    files = s3fs.S3FileSystem(
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        skip_instance_cache=True,
    )

    def answers() -> bool:
        try:
            files.mkdirs("corpus", exist_ok=True)
        except OSError:
            return False
        return True

    try:
        wait_until(answers, "the S3 server")
        yield S3(environment, files)
    finally:
        stop(server)
        log.close()


@pytest.fixture(scope="session")
def ray_head() -> Iterator[RayHead]:
    """A Ray head with two cores and token authentication."""
    port, dashboard, client = free_ports(3)
    # Short: the paths of Ray's sockets have a limit.
    scratch = tempfile.mkdtemp(prefix="ray")
    environment = {
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    command = [
        str(SCRIPTS / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}",
        f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}", "--num-cpus=2",
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
        wait_until(takes_jobs, "the Ray head")
        yield RayHead(url, environment)
    finally:
        stop(server)
        shutil.rmtree(scratch, ignore_errors=True)
