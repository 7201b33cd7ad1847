"""What passes is waited for, what does not is said at once."""

import errno
import logging
import time

import aiohttp
import pytest
from botocore.exceptions import ClientError, CredentialRetrievalError, EndpointConnectionError, NoCredentialsError
from multidict import CIMultiDict, CIMultiDictProxy
from s3fs.errors import translate_boto_error
from yarl import URL

from pipeline.storage import retry as transient
from pipeline.storage.retry import is_transient, patiently


def answered(code: str, status: int) -> Exception:
    """An S3 server's error as s3fs raises it."""
    response = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = ClientError(response, "PutObject")  # type: ignore[arg-type]
    translated: Exception = translate_boto_error(error)
    return translated


def cut_short() -> Exception:
    """Half of an answer's body, as aiohttp raises it."""
    error = aiohttp.ClientPayloadError("Response payload is not completed")
    error.__cause__ = aiohttp.http_exceptions.ContentLengthError("Not enough data")
    return error


def of_azure(name: str, cause: Exception | None = None) -> Exception:
    """An error of a library that need not be installed."""
    error: Exception = type(name, (Exception,), {"__module__": "azure.core.exceptions"})("said")
    error.__cause__ = cause
    return error


REQUEST = aiohttp.RequestInfo(URL("http://127.0.0.1"), "GET", CIMultiDictProxy(CIMultiDict()))


@pytest.mark.parametrize(
    "error",
    [
        answered("SlowDown", 503),
        answered("ServiceUnavailable", 503),
        answered("InternalError", 500),
        answered("NeverHeardOf", 502),
        answered("TooManyRequests", 429),
        answered("RequestTimeout", 400),
        answered("ConditionalRequestConflict", 409),
        answered("NoSuchUpload", 404),
        answered("Throttling", 400),
        CredentialRetrievalError(provider="iam-role", error_msg="timed out"),
        ConnectionResetError(),
        TimeoutError(),
        EndpointConnectionError(endpoint_url="http://127.0.0.1"),
        aiohttp.ClientPayloadError("cut short"),
        cut_short(),
        aiohttp.ClientResponseError(REQUEST, (), status=503),
        of_azure("IncompleteReadError"),
        of_azure("HttpResponseError", of_azure("IncompleteReadError")),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_throttling_resets_outages_and_full_disks_pass(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        answered("AccessDenied", 403),
        answered("SignatureDoesNotMatch", 403),
        answered("NoSuchBucket", 404),
        answered("InvalidBucketName", 400),
        answered("PreconditionFailed", 412),
        answered("PermanentRedirect", 301),
        answered("NotImplemented", 501),
        aiohttp.ClientResponseError(REQUEST, (), status=403),
        of_azure("HttpResponseError"),
        of_azure("ClientAuthenticationError", of_azure("ServiceRequestError")),  # no identity answers
        NoCredentialsError(),
        PermissionError(errno.EACCES, "denied"),
        FileNotFoundError(),
        OSError(errno.EROFS, "read-only"),
        ValueError("ours"),
    ],
)
def test_refusals_do_not(error: Exception) -> None:
    assert not is_transient(error)


def test_an_operation_is_tried_until_it_works() -> None:
    errors = [ConnectionResetError(), TimeoutError(), OSError(errno.EBUSY, "SlowDown")]

    def operation() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert patiently(operation, 30.0, "it") == "done"


def test_patience_ends_and_the_last_error_comes_out() -> None:
    began = time.monotonic()
    with pytest.raises(ConnectionResetError):
        patiently(_reset, 0.5, "it")
    assert time.monotonic() - began > 0.2


def test_a_refusal_is_not_tried_again() -> None:
    calls = []

    def refuse() -> None:
        calls.append(1)
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        patiently(refuse, 30.0, "it")
    assert len(calls) == 1


def test_waiting_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(transient, "WARN_AFTER_S", 0.0)
    with caplog.at_level(logging.WARNING), pytest.raises(ConnectionResetError):
        patiently(_reset, 0.6, "writing")
    assert [record.message.startswith("writing does not work") for record in caplog.records] == [True]


def _reset() -> None:
    raise ConnectionResetError("peer")
