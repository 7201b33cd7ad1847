"""Digests of files are kept, and believed no longer than the file is what it was."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from engine.checkpoints import digests


def test_a_file_is_hashed_once_and_a_damaged_cache_is_done_without(
    copied: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SETTLED_AFTER_S", -1)  # files of this test are young
    file = copied / "model.safetensors"
    whole = digests.file_digest(file)
    [kept] = (cache / "digests").iterdir()
    assert whole == hashlib.sha256(file.read_bytes()).hexdigest()
    kept.write_text(json.dumps([json.loads(kept.read_text())[0], "0" * 64]))
    assert digests.file_digest(file) == "0" * 64, "it was hashed again"
    for damaged in (b"", b"{", b"[1, 2]", b'["", "x"]', b"\xff", b"[" * 50_000, b"[1,2,3]"):
        kept.write_bytes(damaged)
        assert digests.file_digest(file) == whole
    monkeypatch.setenv("SKIPDECODE_CACHE", "/proc/nowhere")
    assert digests.file_digest(file) == whole


def test_a_file_written_by_a_clock_ahead_is_hashed_once(
    copied: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SETTLED_AFTER_S", -1)
    file = copied / "model.safetensors"
    os.utime(file, (time.time(), time.time() + 3600))
    digests.file_digest(file)
    assert len([*(cache / "digests").iterdir()]) == 1


def test_a_file_just_written_is_hashed_again(copied: Path, cache: Path) -> None:
    """The clock of a file system ticks too slowly to tell a second change at once from the first."""
    digests.file_digest(copied / "model.safetensors")
    assert not cache.exists()
