"""Servers of tests: one that does not start is told at once, and why; one whose port is taken takes another."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import servers
from servers import S3Server, ServerEnded, wait_or_stop


def test_a_server_whose_process_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    log, stopped = tmp_path / "log", list[str]()
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit('no room')"], stdout=out, stderr=out)
    server = SimpleNamespace(stop=lambda: stopped.append("stopped"))
    begun = time.monotonic()
    with pytest.raises(ServerEnded, match="the start did not happen, the process ended with 1") as ended:
        wait_or_stop(server, process, lambda: False, "the start", log)
    assert time.monotonic() - begun < servers.START_S / 2
    assert ended.value.__notes__ == ["no room\n"]
    assert stopped == ["stopped"]


@pytest.mark.slow
def test_a_server_whose_port_was_taken_starts_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = servers.free_ports
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        asked = list[int]()

        def ports(count: int) -> list[int]:
            asked.append(count)
            return [port, *free(count - 1)] if len(asked) == 1 else free(count)

        monkeypatch.setattr(servers, "free_ports", ports)
        server = S3Server(tmp_path / "s3")
        try:
            assert len(asked) == 2
            assert str(port) not in server.url
            assert server.files.exists(servers.BUCKET)
        finally:
            server.stop()
