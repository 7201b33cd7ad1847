"""Which storage errors pass by themselves, and waiting for them to pass."""

from __future__ import annotations

import errno
import http.client
import logging
import time
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
    errno.EHOSTUNREACH, errno.EIO, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOSPC, errno.EPIPE, errno.EREMOTEIO,
    errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip
_STATUSES = {408, 409, 425, 429}  # 409: two conditional writes met, neither was refused for good
_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown", "XAmzContentSHA256Mismatch"}
_PERMANENT = (PermissionError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_CONNECTION = (
    ConnectionError,
    TimeoutError,
    aiohttp.ClientError,
    http.client.IncompleteRead,
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.ResponseStreamingError,
)


def is_transient(error: BaseException) -> bool:
    """Throttling, a lost connection, a server that is down, a full disk: not a refusal, not a missing object."""
    for cause in _causes(error):
        if isinstance(cause, botocore.exceptions.ClientError):
            status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = cause.response.get("Error", {}).get("Code")
            return status >= 500 or status in _STATUSES or code in _CODES
    if isinstance(error, _PERMANENT):
        return False
    if isinstance(error, _CONNECTION):
        return True
    return isinstance(error, OSError) and error.errno in _ERRNOS


def patiently(attempt: Callable[[], Result], patience_s: float, what: str) -> Result:
    """Result of an operation that may have to be tried again, with random waits that grow to LONGEST_WAIT_S.

    Raises whatever the operation raised last: an error that does not pass, or one that did not within `patience_s`.
    """
    started = time.monotonic()
    warned = False

    def warn(state: RetryCallState) -> None:
        nonlocal warned
        if not warned and time.monotonic() - started > WARN_AFTER_S:
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
