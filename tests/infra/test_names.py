"""Names in the code and in its map: a class is called as no other, and the map names what is there."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("engine", "pipeline", "jobs")


def test_no_two_classes_share_a_name() -> None:
    trees = [ast.parse(file.read_text()) for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert sum(names.values()) > 100
    assert [name for name, count in names.items() if count > 1] == []


def test_every_path_of_the_map_is_there() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    paths = re.findall(r"`((?:engine|pipeline|jobs|tests|infra|docs)/[\w./-]*)`", text)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
