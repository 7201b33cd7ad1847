"""What jobs print: a plan before, a summary after."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.config import JobConfig
from pipeline.forecaster import forecast_run
from pipeline.preparing.run_record import read_run
from pipeline.reporting.bill import bill
from pipeline.reporting.forecast import FORECAST_FILE, write_forecast
from pipeline.reporting.report import summary
from pipeline.run import RunResult
from pipeline.storage.settings import StorageConfig


def show_plan(config: JobConfig) -> None:
    """Print what a run is expected to take, and store it in the output unless that is another run's and stays so.

    Raises as `forecast_run`.
    """
    forecast = forecast_run(config)
    storage = config.output_storage()
    run = None if config.fresh else read_run(storage.at_first())
    show(f"{config.output}: plan", forecast.facts())
    if run is not None and not forecast.run.startswith(run["fingerprint"]):
        print(f"not kept: the output belongs to run {run['fingerprint']}, and this plan is another run's")
        return
    write_forecast(storage.at_first(), forecast)
    print(f"figures: {storage.url.rstrip('/')}/{FORECAST_FILE}")


def show_result(config: JobConfig, result: RunResult) -> None:
    """Print what a finished run did and cost."""
    facts = summary(result.totals, result.shape.layers) | bill(config.price_per_gpu_hour, result.totals)
    show(f"{result.output}: done in {result.seconds:.0f} s", facts)
    if result.rows_resumed:
        print(f"{result.rows_resumed:,} rows were committed by earlier sessions")


def show(title: str, facts: Mapping[str, str]) -> None:
    """A table of names and values."""
    table = Table(show_header=False, title=Text(title), title_justify="left")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    Console().print(table)


def storage_flags(config: StorageConfig) -> list[str]:
    """How another job reaches the same storage."""
    said = config.model_dump(include=set(StorageConfig.model_fields), exclude_defaults=True)
    named = {f"--{name.replace('_', '-')}": value for name, value in said.items()}
    return [flag if value is True else f"{flag}={value}" for flag, value in named.items()]
