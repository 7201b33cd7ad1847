"""Instruments: what is fast here, and how fast it could be. Run them as modules, `python -m jobs.benchmarks.job`."""
