"""What README and docs tell a reader to run, run as it stands there, page by page, in an empty directory.

Blocks marked bash or python are run, in their order; others are not commands, or need a cluster.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine import Schedule

ROOT = Path(__file__).parents[2]
SERVER = "/srv/skipdecode"
LIMIT_S = 1800
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NEEDS_THE_DEMO = {"docs/output.md"}
PAGES = sorted(str(page.relative_to(ROOT)) for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

slow = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of a page's fenced blocks."""
    return BLOCK.findall((ROOT / page).read_text())


def runnable(page: str) -> list[tuple[str, str]]:
    return [(language, text) for language, text in blocks(page) if language in ("bash", "python")]


def run(folder: Path, language: str, text: str) -> str:
    """What a block said. The folder is all that it can write to."""
    command = ["bash", "-euo", "pipefail", "-c"] if language == "bash" else [".venv/bin/python", "-c"]
    done = subprocess.run(
        [*command, text], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory that holds the project and no outputs."""
    for name in ("engine", "pipeline", "jobs", "infra"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def test_what_is_meant_to_be_run_is_found() -> None:
    languages = [language for page in PAGES for language, _ in runnable(page)]
    assert languages.count("bash") >= 9
    assert languages.count("python") >= 4


@pytest.mark.parametrize("page", [pytest.param(page, marks=slow) for page in PAGES if runnable(page)])
def test_a_page_can_be_followed(page: str, clone: Path) -> None:
    found = runnable(page)
    if page in NEEDS_THE_DEMO:
        demo = "jobs/summarize_corpus.py --config infra/demo/summarize.yaml --output out/demo --ray-address local"
        run(clone, "bash", f".venv/bin/python {demo}")
    together = "".join(text for language, text in found if language == "bash")  # later ones use earlier ones' variables
    said = run(clone, "bash", together) if together else ""
    for language, text in found:
        if language == "python":
            run(clone, language, text)
    if page == "docs/running.md":
        check_the_walk_through(clone, said)


def check_the_walk_through(clone: Path, said: str) -> None:
    """It ends in an adapted, audited job that the next night finds done."""
    assert "verified: " in said
    walk = clone / "out/walk"
    adapted = Schedule.read(walk / "adapted")
    assert adapted.prompt_bridge is not None
    assert "adapted_on" in adapted.provenance
    manifest = json.loads((walk / "summaries/_SUCCESS.json").read_text())
    assert manifest["totals"]["audited"] > 0
    rows = sum(pq.read_metadata(walk / "summaries" / commit["file"]).num_rows for commit in manifest["commits"])
    assert rows == pq.read_metadata(ROOT / "infra/demo/package_descriptions.parquet").num_rows
    for report in ("quality", "summaries"):
        assert (walk / report / "report.html").is_file()

    (night,) = [text for language, text in blocks("docs/running.md") if language == "crontab"]
    command = night.split(maxsplit=5)[5]
    assert SERVER in command
    assert "nothing is new" in run(clone, "bash", command.replace(SERVER, str(clone)))
