"""The input's files, the work units made of them, samples of their rows."""
