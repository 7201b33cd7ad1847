"""report.html: one file, no network, and nothing in it but text can come from a row."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from engine_double import LAYERS, ByteTokenizer, Echo
from fixture_types import Job
from matplotlib.figure import Figure

from engine import Sampling, Schedule
from pipeline.commits.commit import Totals, commit_unit
from pipeline.commits.failed import FailedUnit
from pipeline.reporting import report
from pipeline.reporting.report import summary, write_report
from pipeline.rows.row_generator import RowGenerator
from pipeline.rows.rows import generate, prepare
from pipeline.rows.template import PromptTemplate
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage

SCRIPT = '<script src="https://evil.example/x.js">alert("&")</script>'
FETCHES = re.compile(
    r"""(?:src|href|action)\s*=\s*["']?(?!["'#]|data:)\S+|url\(\s*["']?(?!["'#])\S+|@import""", re.IGNORECASE
)


@pytest.fixture
def report_of(tmp_path: Path, job: Job) -> Callable[..., str]:
    """The report of a run over these texts, in units of two."""

    def render(
        texts: list[str | None],
        audited: dict[str, float] | None = None,
        failed: Sequence[FailedUnit] = (),
        **options: object,
    ) -> str:
        storage, config = Storage(str(tmp_path / "out")), job(**options)
        commits, totals = [], Totals()
        for start in range(0, len(texts), 2):
            rows = texts[start : start + 2]
            table = pa.table({"name": [f"<b>{start}</b>"] * len(rows), "text": pa.array(rows, pa.string())})
            prepared = prepare(
                table, table.schema, "text", PromptTemplate("{text}", format="raw"), ByteTokenizer(), 4096
            )
            ids = [str(row) for row in range(len(rows))]
            output = generate(prepared, ids, RowGenerator(Echo(), Sampling(), None, 2))
            unit = WorkUnit(f"00000-{start:09d}", "a.parquet", start, len(rows))
            commits.append(commit_unit(storage, unit, output, cost={"seconds": 1.0, **(audited or {})}))
            totals += commits[-1].totals
        write_report(storage, config, Schedule.full_depth(LAYERS), "abcdef", commits, totals, [], [], failed)
        return (tmp_path / "out/report.html").read_text()

    return render


def test_what_a_row_says_is_text_and_never_markup(report_of: Callable[..., str]) -> None:
    html = report_of([SCRIPT, "fine", None], system=SCRIPT)
    assert "<script" not in html
    assert "&lt;script src=" in html
    assert "<b>0</b>" not in html


def test_what_audits_take_from_the_saving_is_told_beside_it(report_of: Callable[..., str]) -> None:
    totals = Totals(audited=1, flops_prompt=3, flops_decode=1, flops_full_depth=8, flops_audit=12)
    told = summary(totals, LAYERS)["audit"]
    assert told.endswith("; 0.000 T FLOPs beside all others, 0.500x with them")
    html = " ".join(report_of(["text"] * 2, audited={"audited": 1, "flops_audit": 10**20}).split())
    assert "x fewer FLOPs than at full depth for whole samples (0.00x with their audits)," in html


def test_the_report_of_an_incomplete_run_says_so_first(report_of: Callable[..., str]) -> None:
    failed = [FailedUnit(f"00001-{start:09d}", "b.parquet", start, 256, 3, "no") for start in (0, 256)]
    file = FailedUnit("00002-000000000", "c.parquet", 0, 0, 1, "read: it is no Parquet file")

    def headline(*failed: FailedUnit) -> str:
        return " ".join(report_of(["one", "two"], failed=failed).split()).split("<h2>")[0]

    assert "2 rows, and not complete: 512 rows in 2 units failed." in headline(*failed)
    assert "2 rows, and not complete: 1 whole file failed." in headline(file)
    assert "2 rows, and not complete: 512 rows in 2 units and 1 whole file failed." in headline(*failed, file)
    assert "not complete" not in headline()


def test_the_report_fetches_nothing(report_of: Callable[..., str]) -> None:
    html = report_of(["one", "two", "three", None])
    assert not FETCHES.findall(html)
    assert "<svg" in html


def test_the_report_shows_samples_errors_and_the_configuration(report_of: Callable[..., str]) -> None:
    html = report_of(["a sample generation", None], prompt="Read this: {text}")
    for shown in ("a sample generation", "text is null", "Read this: {text}", "abcdef"):
        assert shown in html
    assert "Beside full depth" not in html  # nothing was audited


def test_an_audit_is_told_in_the_headline_and_beside_full_depth(report_of: Callable[..., str]) -> None:
    audited = {"audited": 1, "audit_rouge": 0.8, "audit_nll": 30.0, "audit_tokens": 40, "audit_full_nll": 20.0,
               "audit_full_tokens": 50, "audit_repetition": 0.1, "audit_full_unsupported": 2}  # fmt: skip
    html = " ".join(report_of(["text"] * 20, audited=audited).split())
    assert (
        "excess NLL 0.350 [0.350, 0.350] nats a token, of 10 audited rows; repetition 10.0%, full depth 0.0%." in html
    )
    assert "with their audits" not in html  # which took nothing
    assert "<h2>Beside full depth</h2>" in html
    assert "unsupported claims</th><td>0.00 numbers and names" in html


@pytest.mark.parametrize("texts", [[], [None], [None, "", None], ["x"]])
def test_a_run_of_no_rows_or_only_bad_ones_has_a_report(report_of: Callable[..., str], texts: list[str | None]) -> None:
    assert f"{len(texts)} rows" in report_of(texts)


def test_lengths_are_counted_in_the_same_bins_and_by_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(report, "to_svg", lambda figure: figures.append(figure) or "")
    report._lengths_chart({"prompt_tokens": [100, 300], "generated_tokens": [3, 8]})
    [axes] = figures[0].axes
    assert len({round(bar.get_width(), 6) for bar in axes.patches}) == 1
    assert all(tick == int(tick) for tick in axes.get_yticks())
