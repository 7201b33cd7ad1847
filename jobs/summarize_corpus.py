"""Summarise every text of a Parquet corpus on Ray Data, at reduced depth, exactly once.

python jobs/summarize_corpus.py --input corpus/ --output out/ --id-column id --target-speedup 1.1
"""

import shlex
import sys

from pydantic import Field

from jobs import command_line, job_output
from jobs.prompts import SUMMARIZE
from pipeline.config import JobConfig, PromptText
from pipeline.run import run_job

PROGRAM = "summarize_corpus.py"


class SummarizeCorpus(JobConfig):
    """Summarise every text of a Parquet corpus, at a fraction of the decoding compute. Rerun to resume."""

    prompt: PromptText = SUMMARIZE
    max_new_tokens: int = Field(64, ge=1, description="longest summary")


def summarize(config: SummarizeCorpus) -> None:
    if config.plan:
        job_output.show_plan(config)
        return
    result = run_job(config)
    job_output.show_result(config, result)
    if result.report:
        print(f"report: {result.report}")
    look = [sys.executable, "-m", "jobs.inspect_run", result.output, *job_output.storage_flags(config)]
    print(f"look into it with: {shlex.join(look)}")


if __name__ == "__main__":
    sys.exit(command_line.start(SummarizeCorpus, PROGRAM, summarize))
