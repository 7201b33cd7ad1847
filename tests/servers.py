"""Real servers on free ports of this machine, and waiting for them."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import s3fs
from botocore.exceptions import BotoCoreError
from ray.exceptions import RayError
from ray.job_submission import JobSubmissionClient

SCRIPTS = Path(sys.executable).parent
TESTS = Path(__file__).parent
# What processes of clusters and jobs find: the project, and the doubles that jobs here bring.
IMPORTS = ":".join(map(str, (TESTS.parent, TESTS, TESTS / "pipeline", TESTS / "faults")))
START_S, STOP_S = 60, 5
LOG_SHOWN = 3000  # characters of the log of a server that did not start
BUCKET = "corpus"
Started = TypeVar("Started")
# Ray on a machine that does other things too: workers as quick as the test that waits for them, time for a slow start.
BUSY_MACHINE = {"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "180"}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for open_socket in sockets:
            open_socket.bind(("127.0.0.1", 0))
        return [int(open_socket.getsockname()[1]) for open_socket in sockets]
    finally:
        for open_socket in sockets:
            open_socket.close()


def wait_until(ready: Callable[[], bool], what: str, limit_s: float = START_S) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if ready():
            return
        time.sleep(0.1)
    raise TimeoutError(f"{what} did not happen within {limit_s:g} s")


class ServerEnded(Exception):
    """A server's process has ended before the server could be used."""


def wait_or_stop(
    server: Any,
    process: subprocess.Popen[bytes],
    ready: Callable[[], bool],
    what: str,
    log: Path,
    limit_s: float = START_S,
) -> None:
    """`wait_until`, of a server that nobody else could stop if it does not come.

    Raises TimeoutError, and ServerEnded without waiting on; both show the end of the log.
    """

    def came() -> bool:
        # First: whoever else has its port may never answer.
        if process.poll() is not None:
            raise ServerEnded(f"{what} did not happen, the process ended with {process.returncode}")
        return ready()

    try:
        wait_until(came, what, limit_s)
    except (TimeoutError, ServerEnded) as error:
        error.add_note(log.read_text(errors="replace")[-LOG_SHOWN:])
        server.stop()
        raise


def on_free_ports(start: Callable[[], Started]) -> Started:
    """What `start` starts on ports that it finds free; once again where one was taken first."""
    try:
        return start()
    except ServerEnded:
        return start()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process group to end, then make it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(STOP_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


class S3Server:
    """SeaweedFS with a bucket named "corpus". What it has acknowledged outlives kill -9."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder.parent / f"{folder.name}.log"
        self._secret = secrets.token_hex(16)
        folder.mkdir(parents=True, exist_ok=True)
        on_free_ports(self._start_first)

    def _start_first(self) -> None:
        names = ("s3", "master", "volume", "filer", "admin")
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.url = f"http://127.0.0.1:{self._ports['s3']}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": self._secret,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }
        self.files = s3fs.S3FileSystem(
            key=self.environment["AWS_ACCESS_KEY_ID"],
            secret=self.environment["AWS_SECRET_ACCESS_KEY"],
            endpoint_url=self.url,
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self.start()

    def start(self) -> None:
        """Returns once it answers, on the ports that it has had before."""
        command = [
            str(SCRIPTS / "weed"), "mini", f"-dir={self._folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
            *(f"-{name}.port={number}" for name, number in self._ports.items()),
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | self.environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_or_stop(self, self._process, self._answers, "the start of the S3 server", self._log)

    def kill(self) -> None:
        """kill -9."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)

    def stop(self) -> None:
        stop(self._process)

    def _answers(self) -> bool:
        try:
            self.files.mkdirs(BUCKET, exist_ok=True)
            # A server that has just come back takes requests before it can store anything.
            self.files.pipe_file(f"{BUCKET}/.probe", b"1")
        except (OSError, BotoCoreError):
            return False
        return True


class RayHead:
    """A Ray head with two cores and token authentication."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Returns once it takes jobs, which have this environment."""
        on_free_ports(partial(self._start, environment))

    def _start(self, environment: Mapping[str, str]) -> None:
        port, dashboard, client, metrics, agent = free_ports(5)
        self._scratch = tempfile.mkdtemp(prefix="ray")  # short: the paths of Ray's sockets have a limit
        self.dashboard = f"http://127.0.0.1:{dashboard}"
        self.metrics = f"http://127.0.0.1:{metrics}/metrics"  # what Prometheus would scrape
        self.environment = {
            "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **environment,
        }
        command = [
            str(SCRIPTS / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}",
            f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}", "--num-cpus=2",
            f"--metrics-export-port={metrics}", f"--dashboard-agent-listen-port={agent}",
            f"--object-store-memory={300 << 20}", f"--temp-dir={self._scratch}", "--disable-usage-stats",
        ]  # fmt: skip
        said = Path(self._scratch, "head.log")
        with said.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | self.environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_or_stop(self, self._process, self._takes_jobs, "the start of the Ray head", said, limit_s=120)

    def submit(self, command: Sequence[str]) -> list[str]:
        """The command line that submits another, with this directory."""
        ray = [str(SCRIPTS / "ray"), "job", "submit", "--address", self.dashboard, "--working-dir", "."]
        return [*ray, "--", *command]

    def stop(self) -> None:
        stop(self._process)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _takes_jobs(self) -> bool:
        headers = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        try:
            JobSubmissionClient(self.dashboard, headers=headers).submit_job(entrypoint="true")
        except (ConnectionError, RuntimeError, RayError):  # the dashboard is up before the agent that starts jobs
            return False
        return True
