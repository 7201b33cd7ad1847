"""How storage is reached: everything but credentials, which only the environment, a profile or a role may give."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import JobError
from pipeline.redaction import redacted

S3_SCHEMES = ("s3", "s3a")
AZURE_SCHEMES = ("abfs", "abfss", "az")
# A user and a password, of what follows "://". The password may hold slashes, as secrets of AWS do; a port is none, and
# on S3 there is none.
_PASSWORD = re.compile(r"(?!arn:)[^/?#\[]*:(?!\d+[/?#]).*@")
_S3_PASSWORD = re.compile(r"(?!arn:)[^/?#\[]*:.*@")


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """Of one storage; the S3 parts mean nothing to other schemes."""

    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    path_style: bool = False
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    patience_s: float = 600.0  # how long throttling, resets and outages are waited for

    def __post_init__(self) -> None:
        """Raises JobError for an endpoint that is no URL or carries credentials."""
        if self.endpoint is None:
            return
        _, at, host = self.endpoint.rpartition("@")
        if at:
            raise JobError(f"the endpoint of {host!r} carries credentials: {_WHERE}")
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise JobError(f"endpoint {self.endpoint!r} is no URL: write one such as https://s3.example.org")

    def options(self, url: str) -> dict[str, Any]:
        """Arguments for the file system of a URL. Raises JobError for a URL that carries credentials."""
        scheme = url.partition("://")[0] if "://" in url else ""
        refuse_credentials(url)
        # Listings are never cached: other processes write here too.
        options: dict[str, Any] = {"use_listings_cache": False}
        if scheme not in S3_SCHEMES:
            return options
        client = {"endpoint_url": self.endpoint, "region_name": self.region}
        return options | {
            "anon": self.anonymous,
            "client_kwargs": {name: value for name, value in client.items() if value},
            "config_kwargs": {
                "connect_timeout": self.connect_timeout_s,
                "read_timeout": self.read_timeout_s,
                # Errors are retried in one place only, `transient`: nested retries would multiply.
                "retries": {"mode": "standard", "total_max_attempts": 1},
                **({"s3": {"addressing_style": "path"}} if self.path_style else {}),
            },
            # With more, s3fs asks for the size of every object before it reads it: a request per commit record.
            "max_concurrency": 1,
            **({"profile": self.profile} if self.profile else {}),
        }


def refuse_credentials(url: str) -> None:
    """Raises JobError, without repeating them, for credentials in a URL: a password, or a signature in its query."""
    if "://" not in url:
        return
    scheme, _, rest = url.partition("://")
    password = (_S3_PASSWORD if scheme in S3_SCHEMES else _PASSWORD).match(rest)
    authority = re.split("[/?#]", rest[password.end() :] if password else rest, maxsplit=1)[0]
    _, at, host = authority.rpartition("@")
    # abfs://container@account.dfs.core.windows.net/path is how Azure writes an address.
    if password or (at and scheme not in AZURE_SCHEMES):
        raise JobError(f"the URL of {host!r} carries credentials: {_WHERE}")
    if redacted(url) != url:
        raise JobError(f"the URL of {host!r} carries a signature, which is a credential: {_WHERE}")


_WHERE = "leave them to the environment, a profile (s3_profile) or the machine's role"
