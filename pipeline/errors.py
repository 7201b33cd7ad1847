"""What ends a job. Each message is one sentence that names the bad value and the way out."""


class JobError(Exception):
    """The job cannot start or go on: the input, the output or the configuration has to change first."""


def one_line(error: BaseException) -> str:
    """What a library says in several lines, for use inside such a message."""
    return " ".join(str(error).split())
