"""Whatever columns and patterns are called, the card shows them and means nothing else."""

import pyarrow as pa
import pytest
import yaml
from markdown_it import MarkdownIt

from pipeline.commits.commit import Totals
from pipeline.dataset.card import write_card
from pipeline.dataset.config import DatasetConfig
from pipeline.dataset.filters import Filters

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize(
    "text",
    [HOSTILE, f"`{HOSTILE}`", f"a | b\n\n{HOSTILE}", f"```\n{HOSTILE}", f"</code>{HOSTILE}", f"---\nx: {HOSTILE}"],
)
def test_no_text_in_a_card_is_markup(text: str) -> None:
    config = DatasetConfig(
        input="in", output=f"out/{text}", prompt=f"{text.replace('{', '')} {{text}}", system=text, dataset_name=text,
        dataset_license=text, forbid_pattern=text,
    )  # fmt: skip
    asked = {"prompt": config.prompt, "prompt_format": "chat", "system": text}
    run = {"model": [text], "version": "1", "fingerprint": "0", "sampling": {"stop": [text]}, "prompt": asked}
    filters = Filters(config)
    filters._dropped["pattern"] = 1
    schema = pa.schema([(text, pa.struct([(text, pa.string())]))])
    card = write_card(config, run, Totals(rows=1), filters, schema)
    _, front, body = card.split("---\n", 2) if not text.startswith("---") else ("", *card[4:].split("\n---\n", 1))
    assert yaml.safe_load(front)["pretty_name"] == text
    html = MarkdownIt("commonmark").enable("table").render(body)
    assert "<img" not in html
    assert html.count("<table>") == 2
    (columns,) = [part for part in html.split("<table>") if "column" in part and "type" in part and "<td" in part][-1:]
    assert columns.count("<td") == 2


@pytest.mark.parametrize("audited", [True, False])
def test_an_audited_run_says_how_far_it_is_from_full_depth(audited: bool) -> None:
    totals = Totals(rows=9)
    if audited:
        totals += Totals(audited=2, audit_rouge=1.6, audit_nll=30, audit_tokens=40, audit_full_nll=20,
                         audit_full_tokens=50)  # fmt: skip
    asked = {"prompt": "{text}", "prompt_format": "chat", "system": None}
    run = {"model": ["m"], "version": "1", "fingerprint": "0", "sampling": {}, "prompt": asked}
    config = DatasetConfig(input="in", output="out")
    card = write_card(config, run, totals, Filters(config), pa.schema([]))
    said = (
        "- Beside full depth: excess NLL 0.350 nats a token, of 2 audited rows; ROUGE-L to full depth 0.800; repetition"
    )
    assert (said in card) == ("Beside full depth" in card) == audited
    assert "| filter |" not in card
    assert "flops_prompt" not in card
    several = {**run, "sampling": {"samples_per_prompt": 2}}
    assert "`flops_prompt` is in the row of the first" in write_card(
        config, several, totals, Filters(config), pa.schema([])
    )
