"""Summarise every text of a Parquet corpus on Ray Data, at reduced depth, exactly once.

python jobs/summarize_corpus.py --input corpus/ --output out/ --id-column id --target-speedup 1.1
"""

from __future__ import annotations

import sys

from pydantic import Field
from rich.console import Console
from rich.table import Table

from jobs import command_line
from pipeline.config import JobConfig
from pipeline.report import summary
from pipeline.run import run_job

PROGRAM = "summarize_corpus.py"


class SummarizeCorpus(JobConfig):
    """Summarise every text of a Parquet corpus, at a fraction of the decoding compute. Rerun to resume."""

    prompt: str = Field(
        "Summarize the following text in one short sentence.\n\n{text}",
        description="user text, with {text} and {column} fields; {{ and }} are plain braces",
    )
    max_new_tokens: int = Field(64, ge=1, description="longest summary")


def main() -> int:
    command_line.log_to_stderr()
    config = command_line.parse(SummarizeCorpus, PROGRAM)
    return command_line.run(PROGRAM, lambda: summarize(config))


def summarize(config: SummarizeCorpus) -> None:
    result = run_job(config)
    table = Table(show_header=False, title=f"{result.output}: done in {result.seconds:.0f} s", title_justify="left")
    for name, value in summary(result.totals, result.shape.layers).items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if result.rows_resumed:
        console.print(f"{result.rows_resumed:,} rows were committed by earlier sessions")
    console.print(f"report: {result.report}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
