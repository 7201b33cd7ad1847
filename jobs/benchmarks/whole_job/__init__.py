"""The parts of `jobs.benchmarks.job`."""
