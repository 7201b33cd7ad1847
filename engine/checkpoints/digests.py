"""SHA-256 of files, each hashed once: kept by path, size, times and inode in a small cache beside the conversions."""

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from pathlib import Path

from engine.json_text import read_json

# A file written to again within one tick of its file system's clock looks unchanged: one so young is not remembered.
SETTLED_AFTER_S = 3.0
LARGE = 1 << 30  # bytes, that take a while to read

log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Where conversions and digests are kept: SKIPDECODE_CACHE, else in the home directory, or / for who has none."""
    home = os.path.expanduser("~")
    return Path(os.environ.get("SKIPDECODE_CACHE") or Path("/" if home == "~" else home, ".cache", "skipdecode"))


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes. Raises OSError if it cannot be read."""
    path = path.resolve()
    while True:
        before = _state(path)
        kept = cache_directory() / "digests" / hashlib.sha256(before.encode("utf-8", "surrogatepass")).hexdigest()
        if (known := _read(kept, before)) is not None:
            return known
        if path.stat().st_size >= LARGE:
            log.info("hashing %s, %.1f GB, once", path.name, path.stat().st_size / 1e9)
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if _state(path) == before:
            break  # else it was replaced while it was read
    stat = path.stat()
    if time.time() - stat.st_ctime > SETTLED_AFTER_S:
        _write(kept, before, digest)
    return digest


def _state(path: Path) -> str:
    """Differs whenever a file's content may. The time of its last change of any kind can't be set, so a copy that keeps
    the time of writing is noticed too."""
    stat = path.stat()
    return json.dumps([str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_dev, stat.st_ino])


def _read(kept: Path, state: str) -> str | None:
    """None if there is nothing of use, be it damaged or not there."""
    try:
        said, digest = read_json(kept, 2**16)
    except (OSError, ValueError, TypeError):
        return None
    sound = said == state and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
    return digest if sound else None


def _write(kept: Path, state: str, digest: str) -> None:
    """The entry appears whole or not at all, whoever else writes it; a cache that can't be written is done without."""
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as scratch:
            scratch.write(json.dumps([state, digest]).encode())
        os.replace(scratch.name, kept)
