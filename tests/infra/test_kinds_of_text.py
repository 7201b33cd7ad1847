"""How texts of several kinds are cut; the registries that they come from are not asked."""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

KINDS = Path(__file__).parents[2] / "infra/kinds"


@pytest.fixture
def collect(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(KINDS)
    import collect

    yield collect
    del sys.modules["collect"]


def test_passages_are_whole_sentences_of_so_many_words_to_twice_as_many(collect) -> None:  # type: ignore[no-untyped-def]
    sentence = "One two three four five six seven eight nine ten."
    endless = " ".join(["word"] * 200) + "."
    text = "\n".join([sentence] * 20 + [endless] + [sentence] * 7)
    passages = list(collect._passages(text, 80))
    assert list(collect._passages(text, 200)) == [" ".join([sentence] * 20), endless]
    assert passages == [" ".join([sentence] * 8)] * 2  # what is too long, and what is left over, is not one


def test_docstrings_of_what_is_public_without_their_examples(collect) -> None:  # type: ignore[no-untyped-def]
    words = " ".join(f"word{number}" for number in range(200))
    source = f'''
def long():
    """{words}"""

def described():
    """{words[:500]}

    Examples
    --------
    >>> described()
    """

def short():
    """Too little."""

def _private():
    """{words}"""
'''
    found = dict(collect._docstrings_of("package/module.py", source.encode()))
    assert found == {
        "package/module.py:long": " ".join(words.split()[:140]),
        "package/module.py:described": words[:500],
    }


def test_each_text_is_written_once(collect, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    collect.write(tmp_path / "texts.parquet", [("here", "a text"), ("there", "a text"), ("there", "another")])
    rows = pq.read_table(tmp_path / "texts.parquet").to_pylist()
    assert [row["text"] for row in rows] == ["a text", "another"]
    assert len({row["id"] for row in rows}) == 2
