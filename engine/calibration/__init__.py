"""Calibration: closed-form bridges and the schedules that make the most of them, from a few hundred prompts."""
