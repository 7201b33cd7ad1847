"""What ends a job. Each message is one sentence that names the bad value and the way out."""

from engine import brief
from pipeline.redaction import redacted


class _SafeBrief(Exception):
    """Whose message is kept brief, and holds no secrets."""

    def __init__(self, message: object) -> None:
        super().__init__(brief(redacted(str(message))))


class JobError(_SafeBrief):
    """The job cannot start or go on: the input, the output or the configuration has to change first."""


class NoFiles(JobError):
    """The input names no file."""


class JobStopped(_SafeBrief):
    """The job ended before its end through nothing that its configuration could change; a rerun resumes it."""


class UnitsFailed(_SafeBrief):
    """All units were tried and some are recorded under `_failed/`; a rerun tries those again."""


class NothingToDo(Exception):
    """The job ended before it began, and that is fine: another does its work, or nothing is new."""


def one_line(error: BaseException) -> str:
    """What a library says in several lines, for use inside such a message; half a surrogate pair, which no table and no
    file holds, is written out.
    """
    said = redacted(" ".join(str(error).split())) or type(error).__name__
    return said.encode(errors="backslashreplace").decode()


def counted(count: int, noun: str) -> str:
    """Such as 1 file, 2,000 files."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def described(error: BaseException) -> str:
    """Of what kind it is, and what it says in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def last_line(error: BaseException) -> str:
    """Of what Ray says, whose errors begin with a traceback of another process."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
