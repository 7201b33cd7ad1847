"""The job on Ray Data: plan, read, generate on replicas, write, commit, report."""
