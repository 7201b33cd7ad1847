"""What is committed, and what failed."""
