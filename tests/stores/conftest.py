"""Disks, a real S3 server, and Azure's and Google's stores as emulators serve them."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulators import Emulator, azurite, begin, fake_gcs_server, forgetful_google
from inline_session import inline as inline
from servers import BUCKET, SCRIPTS


@pytest.fixture(params=[azurite, fake_gcs_server])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    yield from begin(request.param, tmp_path, monkeypatch)


@pytest.fixture(params=["disk", "S3", azurite, fake_gcs_server])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a directory that nobody has used, on a store of every kind."""
    if request.param == "disk":
        yield str(tmp_path / "folder")
    elif request.param == "S3":
        if not (SCRIPTS / "weed").exists():
            pytest.skip("SeaweedFS, which `make install` brings, is not beside this Python")
        request.getfixturevalue("credentials")
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}"
    else:
        yield from (server.folder() for server in begin(request.param, tmp_path, monkeypatch))


@pytest.fixture
def forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    yield from begin(forgetful_google, tmp_path, monkeypatch)
