"""The job on Ray Data."""
