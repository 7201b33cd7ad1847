"""Adaptation: bridges learn their schedule from the model's own answers, the model itself untouched."""
