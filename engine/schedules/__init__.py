"""Schedules as values and as files; which units they skip, and when."""
