"""What README and docs point at is there: pages, their headings, and options of jobs."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from jobs.adapt_model import AdaptModel
from jobs.average_schedules import AverageSchedules
from jobs.benchmarks.job import BenchmarkJob
from jobs.benchmarks.pipeline import BenchmarkPipeline
from jobs.benchmarks.shapes import WriteShape
from jobs.calibrate_schedule import CalibrateSchedule
from jobs.evaluate_schedule import EvaluateSchedule
from jobs.inspect_run import InspectRun
from jobs.summarize_corpus import SummarizeCorpus
from pipeline.dataset.config import DatasetConfig

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]
JOBS: dict[str, type[BaseModel]] = {
    "adapt_model.py": AdaptModel,
    "average_schedules.py": AverageSchedules,
    "calibrate_schedule.py": CalibrateSchedule,
    "evaluate_schedule.py": EvaluateSchedule,
    "generate_dataset.py": DatasetConfig,
    "inspect_run.py": InspectRun,
    "summarize_corpus.py": SummarizeCorpus,
    "jobs.benchmarks.job": BenchmarkJob,
    "jobs.benchmarks.pipeline": BenchmarkPipeline,
    "jobs.benchmarks.shapes": WriteShape,
    "JOB=": BenchmarkJob,
}
OF_ALL = {"--config", "--help"}
OF_OTHERS = {
    *("--additional-config", "--attention-backend", "--block-size", "--enforce-eager", "--load-format"),  # vLLM
    *("--gpu-memory-utilization", "--scheduling-policy", "--address", "--working-dir", "--generate"),  # vLLM, Ray
    *("--include", "--exclude", "--recursive", "--no-deps", "--merge", "--passage-words"),  # aws, pip, llama.cpp, ours
    *("--ablation", "--batch-sizes"),  # of commits that measurements name
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*\b(?!-)")


def headings(page: Path) -> set[str]:
    """As GitHub writes them into an address."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def flags_of(job: type[BaseModel]) -> set[str]:
    return {"--" + name.replace("_", "-") for name in job.model_fields} | OF_ALL


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_are_there(page: str) -> None:
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text()):
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_is_an_option_of_a_job(page: str) -> None:
    known = set[str]().union(*map(flags_of, JOBS.values())) | OF_OTHERS
    assert set(FLAG.findall((ROOT / page).read_text())) - known == set()


def test_a_command_names_options_of_its_own_job() -> None:
    """Up to where its line or its quotation ends."""
    commands = [
        (job, set(FLAG.findall(rest)))
        for page in PAGES
        for job, rest in re.findall(rf"({'|'.join(map(re.escape, JOBS))})((?:\\\n|[^`\n])*)", (ROOT / page).read_text())
    ]
    assert len(commands) > 40
    assert {job for job, _ in commands} == set(JOBS)
    wrong = [(job, flags - flags_of(JOBS[job]) - OF_OTHERS) for job, flags in commands]
    assert [each for each in wrong if each[1]] == []
