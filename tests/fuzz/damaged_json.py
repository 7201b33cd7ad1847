"""Damage to JSON: of bytes, of values, of what stands under a record's name."""

import gzip
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP, LONG = 100_000, 2_000_000
_BARE = "@@bare {}@@"  # stands for JSON text that Python's own writer would not write


def _bare(text: str) -> str:
    return _BARE.format(text)


def values(canary: Path) -> list[Any]:
    """What may stand where something else should."""
    return [
        None, True, False, -1, 0, 1, 0.5, -0.0, 10**9, 2**53 + 1, 2**63, 10**30, 10**400, 1e308,
        *map(_bare, ("NaN", "-Infinity", "1e999", "-1e999", "9" * 5_000, "[" * DEEP + "]" * DEEP, '{"a":' * 70 + "1")),
        _bare("[" + "0," * 300_000 + "0]"), _bare("01"), _bare('"\\ud800"'), _bare('"\\u0000"'), _bare('"\\x"'),
        "", " ", "a", "0", "1e999", "x" * LONG, "a\nb", "\u2028", "\x1b[2J", "</script><b>", "{0}", "%s", "[bold]", "٣",
        "a" + "9" * 5_000, "m99999999", "a1", "None", "2099-01-01T00:00:00", "sha256:0",
        str(canary), f"../../{canary.name}", f"data/../../{canary.name}", "..", "/", "/dev/zero", "/dev/stdin", "~",
        "C:\\x", "data/x-1.parquet", "data/00000-000000000-0.parquet", "s3://x/y", "file:///dev/zero",
        [], {}, [[]], [None], {"a": 1}, {"": {}}, [1] * 3, {"$ref": "#"}, [[0, 0]], {"rows": "1"},
    ]  # fmt: skip


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += _paths(item, (*path, key))
    return found


def _text(value: Any) -> bytes:
    text = json.dumps(value, indent=1)
    return re.sub(f'"{_BARE.format("(.*?)")}"', lambda found: json.loads(found[0])[len("@@bare ") : -2], text).encode()


def with_value_changed(draw: random.Random, content: bytes, canary: Path) -> tuple[str, bytes]:
    """One to three values are other ones, are gone, or stand elsewhere."""
    whole = [json.loads(content)]
    said = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        path = draw.choice(_paths(whole)[1:] or [(0,)])
        at = whole
        for key in path[:-1]:
            at = at[key]
        key, how = path[-1], draw.choice(["value", "value", "value", "gone", "swapped", "key", "wrapped"])
        if how == "value":
            at[key] = draw.choice(values(canary))
        elif how == "gone" and len(path) > 1:
            del at[key]
        elif how == "swapped" and len(at) > 1:
            other = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
            at[key], at[other] = at[other], at[key]
        elif how == "key" and isinstance(at, dict):
            at[str(draw.choice(values(canary)))] = at.pop(key)
        else:
            at[key] = draw.choice([[at[key]], {"a": at[key]}, str(at[key]), [at[key]] * 10])
        said.append(how)
    return " ".join(said), _text(whole[0])


def with_bytes_changed(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    found = bytearray(content)
    end = len(found)
    how = draw.choice(["bits", "bits", "byte", "truncate", "repeat", "insert", "cut", "digits", "empty", "before"])
    if how == "empty" or not end:
        return how, b""
    start = draw.randrange(end)
    stop = min(end, start + draw.choice([1, 4, 40, 400]))
    if how == "bits":
        for _ in range(draw.randint(1, 4)):
            found[draw.randrange(end)] ^= 1 << draw.randrange(8)
    elif how == "byte":
        found[start] = draw.choice(b'\x00\xff",:{}[]\\0-eE.')
    elif how == "truncate":
        del found[start:]
    elif how == "repeat":
        found[start:start] = found[start:stop] * draw.choice([1, 2, 5_000])
    elif how == "insert":
        found[start:start] = draw.randbytes(draw.randint(1, 16))
    elif how == "cut":
        del found[start:stop]
    elif how == "digits":
        digits = [place for place, byte in enumerate(found) if byte in b"0123456789"] or [start]
        found[draw.choice(digits)] = draw.choice(b"0123456789-e.")
    else:
        found[:0] = draw.choice([b"\xef\xbb\xbf", b"\xff\xfe", b" " * 3_000_000, b"[" * 1000, b"{}", b"null\n"])
    return how, bytes(found)


def in_gzip(draw: random.Random, content: bytes, canary: Path, bomb: Callable[[], bytes]) -> tuple[str, bytes]:
    """Of JSON lines in gzip: damage to the file or to a line."""
    how = draw.choice(["gzip", "gzip", "line", "line", "line", "lines", "bomb", "plain"])
    if how == "gzip":
        said, found = with_bytes_changed(draw, content)
        return f"gzip {said}", found
    lines = gzip.decompress(content).split(b"\n")
    if how == "bomb":
        return how, bomb()
    if how == "plain":
        return how, b"\n".join(lines)
    if how == "line":
        place = draw.randrange(len(lines))
        if draw.random() < 0.7:
            _, line = with_value_changed(draw, lines[place], canary)
            lines[place] = line.replace(b"\n", b"")
        else:
            _, lines[place] = with_bytes_changed(draw, lines[place])
    else:
        draw.shuffle(lines)
        lines = lines * draw.choice([1, 2, 3])
    return how, gzip.compress(b"\n".join(lines), 1)


def put_instead(draw: random.Random, path: Path, canary: Path) -> str:
    """What is no file, or a far too large one, under a record's name."""
    how = draw.choice(["zeros", "pipe", "folder", "canary", "itself", "nowhere", "large", "gone", "renamed"])
    if how == "renamed":
        name = draw.choice(["x", "a b", "..x", "%2e%2e", "a\nb", "\udcff", "x" * 200, "[1]", "*", "#"])
        path.rename(path.with_name(f"{name}{path.suffix}"))
        return how
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "large":
        with path.open("wb") as file:
            file.truncate(3 << 30)
    elif how != "gone":
        path.symlink_to({"zeros": "/dev/zero", "canary": str(canary), "itself": path.name, "nowhere": "no"}[how])
    return how
