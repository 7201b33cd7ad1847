"""Names in the code and in its map: a class is called as no other, and the map names what is there."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("engine", "pipeline", "jobs")


def test_no_two_classes_share_a_name() -> None:
    trees = [ast.parse(file.read_text()) for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert sum(names.values()) > 100
    assert [name for name, count in names.items() if count > 1] == []


MAP = (ROOT / "docs/architecture.md").read_text()


def test_every_path_of_the_map_is_there() -> None:
    """From the root or from a folder of the code; a bare name may also stand beside what was named before it."""
    paths = re.findall(r"`((?:engine|pipeline|jobs|tests|infra|docs)/[\w./-]*|[\w./-]+(?:\.py|/))`", MAP)
    assert len(paths) > 100
    beside, missing = ROOT, []
    for path in paths:
        found = [place for folder in ("", *PRODUCT, beside) if (place := ROOT / folder / path).exists()]
        missing += [] if found else [path]
        if found and "/" in path:
            beside = found[0] if found[0].is_dir() else found[0].parent
    assert missing == []


@pytest.mark.parametrize("folder", ["engine", "pipeline"])
def test_the_table_of_rooms_names_each_and_no_other(folder: str) -> None:
    [table] = re.findall(rf"^\| `{folder}/`, top floor first .*\n\|---.*\n((?:\|.*\n)+)", MAP, re.MULTILINE)
    named = [name for row in table.splitlines() for name in re.findall(r"`(.+?)`", row.split("|")[1])]
    rooms = [path.parent.name + "/" for path in (ROOT / folder).glob("*/__init__.py")]
    files = [path.name for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
    assert sorted(named) == sorted(rooms + files)
