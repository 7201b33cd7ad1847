"""Who generates in `jobs.benchmarks.job`: a program each, on Python's own library and what it is named after."""
