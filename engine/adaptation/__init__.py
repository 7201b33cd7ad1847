"""Adaptation: bridges and adapters learn a schedule from the model's own answers, its weights untouched."""
