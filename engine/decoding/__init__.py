"""Rows of a batch from prompt to end."""
