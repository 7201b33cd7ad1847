"""Azure's and Google's stores as emulators serve them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from emulators import Emulator, azurite, begin, fake_gcs_server, forgetful_google
from inline_session import InlineSession, without_ray


@pytest.fixture(params=[azurite, fake_gcs_server])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    yield from begin(request.param, tmp_path, monkeypatch)


@pytest.fixture
def forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    yield from begin(forgetful_google, tmp_path, monkeypatch)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> type[InlineSession]:
    return without_ray(monkeypatch)
