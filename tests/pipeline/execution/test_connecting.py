"""A Ray that cannot be had is told in a sentence, at once."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from servers import BUSY_MACHINE, SCRIPTS, free_ports, stop, wait_until

from pipeline.execution import cluster
from pipeline.execution.cluster import EMBEDDED_STORE_BYTES, check_shared

CONNECT = "import sys; from pipeline.execution.cluster import connect; connect(sys.argv[1] or None)"


def last_words(address: str, **environment: str) -> str:
    """Of a process that connects to it."""
    command = [sys.executable, "-c", CONNECT, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.fixture
def closed() -> str:
    """A host and port that nobody listens at."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        host, port = reserved.getsockname()
    return f"{host}:{port}"


def test_a_cluster_where_nobody_listens_is_named(closed: str) -> None:
    assert last_words(closed).startswith(f"pipeline.errors.JobError: Ray cluster '{closed}' cannot be reached (")


def test_a_cluster_of_the_environment_where_nobody_listens_is_named_with_its_variable(closed: str) -> None:
    said = last_words("", RAY_ADDRESS=closed)
    assert said.startswith(f"pipeline.errors.JobError: Ray cluster '{closed}', which RAY_ADDRESS names, cannot be rea")


def test_a_signal_to_all_of_the_group_leaves_the_ray_of_a_job_that_ends_in_its_own_time() -> None:
    script = """
import os, ray, signal
from pipeline.execution.cluster import connect
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append("told"))
connect("local")
os.killpg(0, signal.SIGTERM)
print(*told, ray.get(ray.remote(lambda: "and at work").remote(), timeout=100))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True)
    assert done.stdout.splitlines()[-1:] == ["told and at work"], done.stderr


def test_a_path_that_sockets_cannot_have_is_said_to_be_the_reason() -> None:
    assert "keep to short paths of plain letters" in last_words("local", RAY_TMPDIR=f"/tmp/{'long' * 30}")


def test_a_ray_that_cannot_start_says_why() -> None:
    said = last_words("local", RAY_TMPDIR="/proc/nowhere")
    assert said.startswith("pipeline.errors.JobError: Ray does not start on this machine (")
    assert "/proc/nowhere" in said


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("patience", [0.0, 30.0])
def test_nodes_that_do_not_answer_whether_they_share_the_local_files_are_named(
    patience: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray has no such nodes: it says so in a moment, mostly later than at once."""
    gone = [
        {"NodeID": f"{number:056x}", "NodeManagerAddress": f"10.0.0.{number}", "Alive": True, "Resources": {"CPU": 1.0}}
        for number in (2, 1)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: gone)
    monkeypatch.setattr(cluster, "LOOK_S", patience)
    check_shared({"input": __file__})
    assert caplog.messages == ["whether 10.0.0.1, 10.0.0.2 share the local files is not known: they did not answer"]


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_without_an_address_a_ray_of_this_machine_is_joined_or_an_embedded_one_started(tmp_path: Path) -> None:
    scratch = tempfile.mkdtemp(prefix="ray")  # short: the paths of Ray's sockets have a limit
    environment = {**os.environ, **BUSY_MACHINE, "RAY_TMPDIR": scratch}
    environment.pop("RAY_ADDRESS", None)
    resources = "import ray; print(ray.cluster_resources()['CPU'], ray.cluster_resources()['object_store_memory'])"
    connect = CONNECT.replace("sys.argv[1]", "None")

    def connected() -> list[float]:
        command = [sys.executable, "-c", f"{connect}; {resources}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return [float(figure) for figure in done.stdout.split()[-2:]]

    assert connected()[1] == EMBEDDED_STORE_BYTES
    command = [str(SCRIPTS / "ray"), "start", "--head", "--block", "--port=0", "--num-cpus=17"]
    command += [f"--object-store-memory={300 << 20}", "--include-dashboard=false", "--disable-usage-stats"]
    kinds = ("ray-client-server", "dashboard-agent-listen", "metrics-export")
    command += [f"--{kind}-port={port}" for kind, port in zip(kinds, free_ports(3), strict=True)]
    said = tmp_path / "head.log"
    with said.open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(Path(scratch, "ray", "ray_current_cluster").exists, "the start of a Ray head", 240)
        assert connected() == [17, 300 << 20]
    finally:
        stop(head)
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_process_keeps_its_own_way_to_end_where_ray_would_put_in_another() -> None:
    then = "import signal; own = signal.default_int_handler; signal.signal(signal.SIGTERM, own)"
    check = "raise SystemExit(signal.getsignal(signal.SIGTERM) is not own)"
    command = [sys.executable, "-c", f"{then}; {CONNECT}; {check}", "local"]
    # More than a raylet may take to start on a busy machine: see BUSY_MACHINE.
    assert subprocess.run(command, timeout=300).returncode == 0
