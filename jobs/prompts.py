"""Prompts that several jobs share, so that what one of them measures holds for the others."""

SUMMARIZE = "Summarize the following text in one short sentence.\n\n{text}"
PACKAGES = "Summarize this software package in one short sentence.\n\n{text}"  # of the demo
