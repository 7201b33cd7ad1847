"""What can go wrong. Each message names the bad value and the way out."""

MOST_SAID = 1500  # characters
NOT_NUMBERS = "the model's logits are not numbers: if its states overflow, another dtype helps"


def brief(message: object) -> str:
    """A message in one line; of one that quotes something very long, the beginning and the end."""
    text = " ".join(str(message).splitlines())
    return text if len(text) <= MOST_SAID else f"{text[: MOST_SAID - 500]} ... {text[-500:]}"


class _Brief(ValueError):
    """Whose message is kept brief."""

    def __init__(self, message: object = "") -> None:
        super().__init__(brief(message))


class ModelError(_Brief):
    """The model cannot be found, read, or run by this engine."""


class ScheduleError(_Brief):
    """The schedule is malformed, does not fit the model, or cannot meet its target."""


class StreamLost(RuntimeError):
    """What a stream's rows ran in has ended, through nothing that they did: in another one they can be generated."""


class PromptError(ValueError):
    """A prompt cannot be generated from: it is empty or leaves no room in the context."""
