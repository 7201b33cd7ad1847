"""Models of the hub: asked for as long as that may help, and of one revision."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

from engine import Engine, ModelError
from engine.checkpoints import checkpoint
from tests.engine.checkpoints.model_files import tokens_of

MODEL = "somebody/some-model"
REFUSED = f"'{MODEL}' is no directory and not to be had from the hub"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is kept of the hub's models: none."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def keep(hub_cache: Path, whole: Path, commit: str) -> None:
    """A commit of the model, the newest."""
    repository = hub_cache / "models--somebody--some-model"
    shutil.copytree(whole, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(commit)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds between tries, which no test waits for."""
    seconds: list[float] = []
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(sleep=seconds.append))
    return seconds


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A hub that answers everything with the status that it is told."""

    class Hub(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    def answer(status: int) -> None:
        Hub.status = status

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield answer
        server.shutdown()


@pytest.mark.usefixtures("offline")
def test_a_hub_id_out_of_reach_is_refused_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(ModelError, match=REFUSED):
        Engine.load(MODEL)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_hub_is_asked_again_for_a_minute(
    hub: Callable[[int], None], waited: list[float], caplog: pytest.LogCaptureFixture, status: int
) -> None:
    hub(status)
    with caplog.at_level("WARNING", "engine"), pytest.raises(ModelError, match=REFUSED):
        checkpoint.locate(MODEL)
    assert waited == sorted(waited)
    assert sum(waited) == 60
    assert caplog.text.count("model somebody/some-model is not to be had from the hub") == len(waited)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_hub_that_has_no_such_model_for_us_is_not_asked_again(
    hub: Callable[[int], None], waited: list[float], status: int
) -> None:
    hub(status)
    with pytest.raises(ModelError, match=REFUSED):
        checkpoint.locate(MODEL)
    assert waited == []


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (HTTPError("connection reset in the middle of a file"), True),
        (TimeoutError("the same, of hf_xet"), True),
        (LocalEntryNotFoundError("cannot find the requested files in the disk cache"), False),
        (OSError("no space left on device"), False),
        (HFValidationError("repo id must be a name"), False),
    ],
)
def test_a_download_that_broke_off_goes_on_unless_it_would_break_off_again(
    whole: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    outcomes: list[Exception | Path] = [error, error, whole]

    def download(*_: object, **__: object) -> Path:
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if again:
        assert checkpoint.locate(MODEL) == whole.resolve()
        assert waited == [1, 2]
    else:
        with pytest.raises(ModelError, match=REFUSED):
            checkpoint.locate(MODEL)
        assert waited == []


def test_a_hub_out_of_reach_is_tried_again(waited: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # and not listened at
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ModelError, match=REFUSED):
            checkpoint.locate(MODEL)
    assert sum(waited) == 60


@pytest.mark.usefixtures("offline")
def test_a_hub_id_in_the_local_hub_cache_loads(whole: Path, hub_cache: Path) -> None:
    keep(hub_cache, whole, commit := "0123456789abcdef0123456789abcdef01234567")
    assert checkpoint.prepare(MODEL) == (hub_cache / "models--somebody--some-model/snapshots" / commit).resolve()
    assert tokens_of(MODEL) == tokens_of(str(whole))


@pytest.mark.usefixtures("offline")
def test_a_hub_id_means_one_revision(whole: Path, hub_cache: Path) -> None:
    commit, later = "0" * 39 + "1", "0" * 39 + "2"
    keep(hub_cache, whole, commit)
    pinned = checkpoint.resolve(MODEL)
    assert pinned == f"{MODEL}@{commit}"
    keep(hub_cache, whole, later)
    assert checkpoint.prepare(pinned).name == commit
    assert checkpoint.resolve(pinned) == pinned
    assert checkpoint.resolve(MODEL) == f"{MODEL}@{later}"
    assert checkpoint.resolve(str(whole)) == str(whole)
