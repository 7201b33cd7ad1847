"""How storage is reached: everything but credentials, which only the environment, a profile or a role may give."""

import os
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pipeline.errors import JobError
from pipeline.redaction import redacted

S3 = ("s3://", "s3a://")
AZURE = ("abfs://", "abfss://", "az://")
# A user and a password, of what follows "://". The password may hold slashes, as secrets of AWS do; a port is none, and
# on S3 there is none. Unlike what is looked for in whole texts, of any length and any characters.
_PASSWORD = re.compile(r"(?!arn:)[^/?#\[]*:(?!\d+[/?#]).*@", re.DOTALL)
_S3_PASSWORD = re.compile(r"(?!arn:)[^/?#\[]*:.*@", re.DOTALL)
# botocore asks for an instance's role once, for a second, and takes a busy machine for one that has none.
_ROLE_PATIENCE = {"AWS_METADATA_SERVICE_TIMEOUT": "3", "AWS_METADATA_SERVICE_NUM_ATTEMPTS": "4"}
_WHERE = "leave them to the environment, a profile (s3_profile) or the machine's role"


def _utf8(said: str) -> str:
    try:
        said.encode()
    except UnicodeEncodeError:  # nor Ray, which has its command line hold some, nor a tokenizer takes it
        raise ValueError("is no valid UTF-8") from None
    return said


Utf8 = Annotated[str, AfterValidator(_utf8)]
# A URL, or a local path, where ~ is the home directory: in YAML no shell makes it so.
Place = Annotated[Utf8, AfterValidator(os.path.expanduser)]
LocalPlace = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]


class StorageConfig(BaseModel):
    """How storage is reached. Credentials have no option: they come from the environment, a profile or a role."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    s3_endpoint: str | None = Field(None, description="URL of an S3 server; default AWS, or AWS_ENDPOINT_URL")
    s3_region: str | None = Field(None, description="default the environment's or the profile's")
    s3_profile: str | None = Field(None, description="profile of the AWS configuration files; default AWS_PROFILE")
    s3_path_style: bool = Field(False, description="write the bucket into the path, for servers without host names")
    s3_connect_timeout_s: float = Field(10.0, gt=0, description="seconds to wait for a connection")
    s3_read_timeout_s: float = Field(60.0, gt=0, description="seconds to wait for the next bytes of an answer")
    storage_patience_s: float = Field(
        600.0, ge=0, description="seconds that throttling, lost connections, outages and full disks are waited for"
    )


def file_system_options(settings: StorageConfig, url: str, anonymous: bool) -> dict[str, Any]:
    """Arguments for the file system of a URL. Raises JobError for credentials in it, and an endpoint that is no URL."""
    _check_endpoint(settings.s3_endpoint)
    refuse_credentials(url)
    # Listings are never cached: other processes write here too.
    options: dict[str, Any] = {"use_listings_cache": False}
    if not url.startswith(S3):
        return options
    for name, value in _ROLE_PATIENCE.items():  # s3fs has no option for it
        os.environ.setdefault(name, value)
    client = {"endpoint_url": settings.s3_endpoint, "region_name": settings.s3_region}
    return options | {
        "anon": anonymous,
        "client_kwargs": {name: value for name, value in client.items() if value},
        "config_kwargs": {
            "connect_timeout": settings.s3_connect_timeout_s,
            "read_timeout": settings.s3_read_timeout_s,
            # Errors are retried in one place only, `patiently`: nested retries would multiply.
            "retries": {"mode": "standard", "total_max_attempts": 1},
            **({"s3": {"addressing_style": "path"}} if settings.s3_path_style else {}),
        },
        # With more, s3fs asks for the size of every object before it reads it: a request per commit record.
        "max_concurrency": 1,
        **({"profile": settings.s3_profile} if settings.s3_profile else {}),
    }


def _check_endpoint(endpoint: str | None) -> None:
    """Raises JobError for one that is no URL or carries credentials."""
    if endpoint is None:
        return
    _, at, host = endpoint.rpartition("@")
    if at:
        raise JobError(f"the endpoint of {host!r} carries credentials: {_WHERE}")
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise JobError(f"endpoint {endpoint!r} is no URL: write one such as https://s3.example.org")


def refuse_credentials(url: str) -> None:
    """Raises JobError, without repeating them, for credentials in a URL: a user, a password, a signed query."""
    rest = url.partition("://")[2]
    password = (_S3_PASSWORD if url.startswith(S3) else _PASSWORD).match(rest)
    authority = re.split("[/?#]", rest[password.end() :] if password else rest, maxsplit=1)[0]
    _, at, host = authority.rpartition("@")
    # abfs://container@account.dfs.core.windows.net/path is how Azure writes an address.
    if password or (at and not url.startswith(AZURE)) or redacted(url) != url:
        raise JobError(f"the URL of {host!r} carries credentials (a user, a password or a signature): {_WHERE}")
