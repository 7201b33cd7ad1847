"""The whole thing on this machine: a real S3 server, a Ray head with its dashboard, the demo by `ray job submit`.

python infra/local/demo.py              # from the repository's root; cleans up behind itself
python infra/local/demo.py --nodes 2    # with a second Ray node
python infra/local/demo.py --keep       # leaves all running until Ctrl-C, to look around
python infra/local/demo.py -- --limit 8 --max-new-tokens 16     # more flags for the job
"""

import argparse
import contextlib
import json
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
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pyarrow.parquet as pq
import s3fs

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sys.executable).parent
TEXTS = ROOT / "infra/demo/package_descriptions.parquet"
BUCKET, INPUT, OUTPUT = "demo", "demo/in", "demo/summaries"
START_S, STOP_S = 120, 15
OBJECT_STORE_BYTES = 500 << 20
SHOWN = 3


def main() -> int:
    parser = argparse.ArgumentParser("demo.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the servers running until Ctrl-C")
    parser.add_argument("--nodes", type=int, default=1, help="Ray nodes, of two CPUs each but for the head")
    parser.add_argument("job_flags", nargs="*", help="flags for the job, after --")
    given = parser.parse_args()
    for sign in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: servers end with this program, whatever ends it
        signal.signal(sign, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="sd"))  # short: the paths of Ray's sockets have a limit
    try:
        with contextlib.ExitStack() as stack:
            environment, files = stack.enter_context(s3_server(folder))
            head = stack.enter_context(ray_head(folder, environment))
            for _ in range(1, given.nodes):
                stack.enter_context(ray_node(folder, environment, head))
            files.put_file(str(TEXTS), f"{INPUT}/texts.parquet")
            code = submit(head, environment, given.job_flags).wait()
            if code == 0:
                show(files)
            if given.keep:
                print(f"S3 {environment['AWS_ENDPOINT_URL']} | dashboard {head.dashboard} | Ctrl-C ends both")
                print("\n".join(f"export {name}={value}" for name, value in environment.items()))
                with contextlib.suppress(KeyboardInterrupt):
                    signal.pause()
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Head:
    """A running Ray head."""

    address: str  # for other nodes
    dashboard: str
    headers: dict[str, str]

    def ask(self, path: str) -> Any:
        """What the dashboard's API answers; None as long as it does not."""
        try:
            with urlopen(Request(self.dashboard + path, headers=self.headers), timeout=5) as answer:
                return json.load(answer)
        except (URLError, OSError, ValueError):
            return None

    def nodes(self) -> int:
        """How many are alive."""
        answer = self.ask("/api/v0/nodes") or {}
        nodes = answer.get("data", {}).get("result", {}).get("result", [])
        return sum(node["state"] == "ALIVE" for node in nodes)


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[tuple[dict[str, str], s3fs.S3FileSystem]]:
    """SeaweedFS on free ports with a secret of its own: (what clients need in their environment, a client)."""
    names = ("master", "volume", "filer", "admin", "s3")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    url = f"http://127.0.0.1:{ports['s3']}"
    environment = {
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16),
        "AWS_ENDPOINT_URL": url,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [
        str(SCRIPTS / "weed"), "mini", f"-dir={folder / 's3'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{name}.port={port}" for name, port in ports.items()),
    ]  # fmt: skip
    (folder / "s3").mkdir()
    files = s3fs.S3FileSystem(
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=url,
        use_listings_cache=False,
        skip_instance_cache=True,
    )

    def answers() -> bool:
        try:
            files.mkdirs(BUCKET, exist_ok=True)
            files.pipe_file(f"{BUCKET}/.probe", b"1")  # it answers before it can store anything
        except OSError:
            return False
        return True

    with process(command, environment, folder / "s3.log"):
        wait_until(answers, "the start of the S3 server", folder / "s3.log")
        print(f"S3 server: {url}", flush=True)
        yield environment, files


@contextlib.contextmanager
def ray_head(folder: Path, environment: dict[str, str]) -> Iterator[Head]:
    """A Ray head on free ports; adds its token to the environment."""
    port, dashboard, client, agent = free_ports(4)
    environment |= {
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    command = [
        str(SCRIPTS / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}",
        f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
        f"--ray-client-server-port={client}", "--disable-usage-stats",
        f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder / 'ray'}",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{dashboard}"
    head = Head(f"127.0.0.1:{port}", url, {"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"})
    with process(command, environment, folder / "ray.log"):
        wait_until(
            lambda: head.ask("/api/jobs/") is not None and head.nodes() == 1,
            "the start of the Ray head",
            folder / "ray.log",
        )
        print(f"Ray dashboard: {url}", flush=True)
        yield head


@contextlib.contextmanager
def ray_node(folder: Path, environment: dict[str, str], head: Head) -> Iterator[None]:
    """One more Ray node, with two CPUs."""
    before = head.nodes()
    (agent,) = free_ports(1)
    command = [
        str(SCRIPTS / "ray"), "start", "--block", f"--address={head.address}", "--node-ip-address=127.0.0.1",
        f"--dashboard-agent-listen-port={agent}", "--num-cpus=2", f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]  # fmt: skip
    log = folder / f"node{before}.log"
    with process(command, environment, log):
        wait_until(lambda: head.nodes() > before, "the start of another Ray node", log)
        print(f"Ray nodes: {head.nodes()}", flush=True)
        yield


def submit(head: Head, environment: dict[str, str], flags: list[str], **streams: Any) -> subprocess.Popen[str]:
    """Start the job on the cluster; the process ends with it, with 0 if it was done."""
    command = [
        str(SCRIPTS / "ray"), "job", "submit", "--address", head.dashboard, "--working-dir", str(ROOT), "--",
        "python", "jobs/summarize_corpus.py", "--config", "infra/demo/summarize.yaml",
        "--input", f"s3://{INPUT}/", "--output", f"s3://{OUTPUT}", *flags,
    ]  # fmt: skip
    return subprocess.Popen(command, env=os.environ | environment, cwd=ROOT, text=True, **streams)


def show(files: s3fs.S3FileSystem) -> None:
    """Some rows of what the manifest lists."""
    manifest = json.loads(files.cat_file(f"{OUTPUT}/_SUCCESS.json"))
    with files.open(f"{OUTPUT}/{manifest['commits'][0]['file']}") as stream:
        rows = pq.read_table(stream).slice(0, SHOWN).to_pylist()
    for row in rows:
        print(f"{row['id']}: {row['generation']}")
    print(f"{manifest['totals']['rows']} rows in s3://{OUTPUT}/data/, listed in s3://{OUTPUT}/_SUCCESS.json")


@contextlib.contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A server in a process group of its own, which ends with the block."""
    with log.open("wb") as stream:
        started = subprocess.Popen(
            command, env=os.environ | environment, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        yield
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(started.pid, sign)
                started.wait(STOP_S)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [int(free.getsockname()[1]) for free in sockets]


def wait_until(ready: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if ready():
            return
        time.sleep(0.2)
    last = log.read_text(errors="replace")[-2000:]
    raise SystemExit(f"{what} did not happen within {START_S} s; its log ends with:\n{last}")


if __name__ == "__main__":
    sys.exit(main())
