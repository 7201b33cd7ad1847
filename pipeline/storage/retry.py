"""Which storage errors pass by themselves, and waiting for them to pass."""

import errno
import http.client
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import aiohttp
import botocore.exceptions
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

log = logging.getLogger(__name__)

Result = TypeVar("Result")

LONGEST_WAIT_S = 20.0
FIRST_WAIT_S = 0.1
WARN_AFTER_S = 5.0  # throttling that passes sooner is nobody's news

# Disk full is among them: space comes back when someone deletes, and until then nothing half-written is left behind.
_ERRNOS = {
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EDQUOT,
    errno.EHOSTUNREACH, errno.EIO, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOSPC, errno.EPIPE,
    errno.ESTALE, errno.ETIMEDOUT, getattr(errno, "EREMOTEIO", errno.EIO),  # the last is Linux's alone
}  # fmt: skip
_STATUSES = {408, 425, 429}
_NEVER = {501, 505}  # what was asked for is not offered
_CODES = {
    "BadDigest", "IncompleteBody", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown",
    "XAmzContentSHA256Mismatch",
    # Of an upload in parts whose end was answered to nobody: s3fs would abandon it then, and it is whole.
    "NoSuchUpload",
    # Of what gives a role its credentials.
    "IDPCommunicationError", "Throttling", "ThrottlingException",
}  # fmt: skip
_PERMANENT = (PermissionError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_CONNECTION = (
    ConnectionError,
    TimeoutError,
    aiohttp.ClientError,
    http.client.IncompleteRead,
    botocore.exceptions.ConnectionError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.MetadataRetrievalError,
)
# Of libraries that need not be installed, so by name.
_LIBRARIES = {"aiohttp", "azure", "botocore", "gcsfs", "google", "huggingface_hub", "requests"}
_CONNECTION_NAMES = {
    "azure.core.exceptions.ServiceRequestError",
    "azure.core.exceptions.ServiceResponseError",
    "gcsfs.retry.ChecksumError",
    "google.auth.exceptions.TransportError",
    "requests.exceptions.ChunkedEncodingError",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
}
_CUT_SHORT = "azure.core.exceptions.IncompleteReadError"


def is_storage_error(error: BaseException) -> bool:
    """Whether storage, or what lies between, has not done what it was asked; any other error is a mistake of ours."""
    return isinstance(error, OSError) or any(name.partition(".")[0] in _LIBRARIES for name in _names(error))


def is_transient(error: BaseException) -> bool:
    """Throttling, a lost connection, a server that is down, a full disk: not a refusal, not a missing object."""
    for cause in _causes(error):
        if isinstance(cause, botocore.exceptions.ClientError):
            code = cause.response.get("Error", {}).get("Code")
            # 409: two conditional writes met, neither was refused for good.
            return _passes(status_of(cause) or 0) or status_of(cause) == 409 or code in _CODES
    if isinstance(error, _PERMANENT):
        return False
    if isinstance(error, _CONNECTION) and not isinstance(error, aiohttp.ClientResponseError):
        return True
    status = status_of(error)
    if status is not None:
        return _passes(status)
    if not _CONNECTION_NAMES.isdisjoint(_names(error)):
        return True
    # Azure asks again for what was cut short, and in the end raises an error without a status because of it.
    if any(_CUT_SHORT in _names(cause) for cause in _causes(error)):
        return True
    return isinstance(error, OSError) and error.errno in _ERRNOS


def status_of(error: BaseException) -> int | None:
    """The HTTP status that a server answered with, None if it is not known."""
    for cause in _causes(error):
        if isinstance(cause, botocore.exceptions.ClientError):
            return int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        if isinstance(cause, aiohttp.http_exceptions.HttpProcessingError):
            continue  # an answer cut short has a code that no server sent
        # azure; aiohttp; gcsfs; requests and huggingface_hub
        answer = getattr(cause, "response", None)
        for holder, name in ((cause, "status_code"), (cause, "status"), (cause, "code"), (answer, "status_code")):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 300 <= status < 600:
                return status
    return None


def _passes(status: int) -> bool:
    return (status >= 500 and status not in _NEVER) or status in _STATUSES


def _names(error: BaseException) -> set[str]:
    """Of an error's class and those it is made from, with their modules."""
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}


def patiently(attempt: Callable[[], Result], patience_s: float, what: str) -> Result:
    """Result of an operation that may have to be tried again, with random waits that grow to LONGEST_WAIT_S.

    Raises whatever the operation raised last: an error that does not pass, or one that did not within `patience_s`.
    """
    warned = False

    def warn(state: RetryCallState) -> None:
        nonlocal warned
        if not warned and (state.seconds_since_start or 0) > WARN_AFTER_S:
            warned = True
            error = state.outcome.exception() if state.outcome else None
            log.warning("%s does not work (%s): trying again for up to %.0f s", what, error, patience_s)

    retrying = Retrying(
        retry=retry_if_exception(is_transient),
        wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=min(LONGEST_WAIT_S, max(FIRST_WAIT_S, patience_s))),
        stop=stop_after_delay(patience_s),
        before_sleep=warn,
        reraise=True,
    )
    return retrying(attempt)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
