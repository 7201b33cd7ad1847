"""The parts of `jobs.benchmarks.engine`."""
