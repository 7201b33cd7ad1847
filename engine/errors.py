"""What can go wrong before generation starts. Each message names the bad value and the way out."""


class ModelError(ValueError):
    """The model cannot be found, read, or run by this engine."""


class ScheduleError(ValueError):
    """The schedule is malformed, does not fit the model, or cannot meet its target."""


class PromptError(ValueError):
    """A prompt cannot be generated from: it is empty or leaves no room in the context."""
