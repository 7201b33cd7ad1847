"""From an input row to its output row."""
