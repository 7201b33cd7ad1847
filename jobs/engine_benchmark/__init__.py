"""The parts of `jobs/benchmark_engine.py`."""
