"""An S3 server's front door that does, at chosen requests, what networks and servers do to clients."""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal
from urllib.parse import unquote

import psutil
from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from servers import BUCKET
from yarl import URL

Action = Literal[
    "throttle",  # 503 SlowDown
    "fail",  # 500 InternalError
    "reset",  # the connection ends before the server has seen the request
    "lose",  # the server has done it, the connection ends without an answer
    "cut",  # half of the answer's body comes
    "slow",  # the answer's body dribbles
    "kill before",  # the process that asks dies of SIGKILL, the server never sees the request
    "kill after",  # the same once the server has done it
    "call before",  # something else happens, then the server sees the request
    "call after",  # something else happens once the server has done it
]

ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"
SLOW_DOWN = ERROR.format("SlowDown", "Please reduce your request rate.")
BROKEN = ERROR.format("InternalError", "We encountered an internal error. Please try again.")
SLOW_PIECES, SLOW_PIECE_S = 8, 0.1
ANY = "any request"  # an operation: nth counts them all


@dataclass
class Fault:
    """One thing that goes wrong."""

    operation: str  # such as "PUT data": see `operation`
    nth: int  # request of that operation that it hits first, from 1
    action: Action
    times: int = 1  # how many requests in a row
    call: Callable[[], object] | None = field(default=None, repr=False)  # what kills says whom, or how many
    hits: int = 0
    killed: int = 0  # processes and nodes that were there to be killed


def operation(method: str, path: str, query: str) -> str:
    """What a request is, by method and the first folder or file below the run's input or output.

    Keys are <bucket>/<run>/in/... and <bucket>/<run>/out/...: "GET in", "PUT data", "PUT _commits", "LIST _commits".
    """
    if method == "GET" and "list-type" in query:
        prefix = next((unquote(part[7:]) for part in query.split("&") if part.startswith("prefix=")), "")
        return f"LIST {_place(prefix.split('/'))}"
    if method == "POST" and "delete" in query:
        return "DELETE"
    place = _place(unquote(path).strip("/").split("/")[1:])
    return f"{method} {'_probe' if place.startswith('_probe') else place}"


def _place(parts: list[str]) -> str:
    """Of a key without its bucket: <run>/in/x -> in, <run>/out/data/x -> data."""
    if len(parts) > 1 and parts[1] == "in":
        return "in"
    return parts[2] if len(parts) > 2 and parts[1] == "out" else ""


class FaultProxy:
    """Serves on a port of its own, in a thread of its own; passes requests on to a server, byte for byte."""

    def __init__(self, server: str) -> None:
        self._server = server
        self.url = ""
        self._run, self._faults = "", list[Fault]()
        self.counts = Counter[str]()
        self._pool = ThreadPoolExecutor(4)  # calls must not stop the loop
        self._loop = asyncio.new_event_loop()
        self._session: ClientSession
        self._signer: S3SigV4Auth | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    def arm(self, run: str, faults: list[Fault] | None = None) -> Counter[str]:
        """From now on count, and spoil, requests for keys below a run. Returns the counts, which go on."""
        self._run, self._faults, self.counts = run, faults or [], Counter()
        return self.counts

    @contextmanager
    def ignoring_conditions(self, environment: dict[str, str]) -> Iterator[None]:
        """Meanwhile the server seems to be one that knows no If-None-Match. Needs its keys: a header is signed."""
        keys = Credentials(environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"])
        self._signer = S3SigV4Auth(keys, "s3", environment["AWS_REGION"])
        try:
            yield
        finally:
            self._signer = None

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._session.close())

    async def _start(self) -> None:
        self._session = ClientSession(
            auto_decompress=False,
            cookie_jar=DummyCookieJar(),
            # A connection of its own for each request: a server that was killed leaves no dead ones behind.
            connector=TCPConnector(limit=64, force_close=True),
            timeout=ClientTimeout(total=60),
        )
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, auto_decompress=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=512).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        kind = operation(request.method, request.rel_url.raw_path, request.rel_url.raw_query_string)
        fault = self._fault(kind) if self._concerns(request) else None
        action = fault.action if fault else None
        body = await request.read()
        if action == "throttle":
            return web.Response(status=503, text=SLOW_DOWN, content_type="application/xml")
        if action == "fail":
            return web.Response(status=500, text=BROKEN, content_type="application/xml")
        if action == "reset":
            return self._hang_up(request)
        if fault and action == "kill before":
            return await self._kill(request, fault)
        if fault and fault.call and action == "call before":
            await self._call(fault, fault.call)
        try:
            status, headers, content = await self._forward(request, body)
        except OSError:  # the server is down: so is its front door
            return self._hang_up(request)
        if action == "lose":
            return self._hang_up(request)
        if fault and action == "kill after":
            return await self._kill(request, fault)
        if fault and fault.call and action == "call after":
            await self._call(fault, fault.call)
        if action in ("cut", "slow") and content:
            return await self._dribble(request, status, headers, content, cut=action == "cut")
        return web.Response(status=status, headers=headers, body=content)  # a HEAD's length is among the headers

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        url = URL(f"{self._server}{request.raw_path}", encoded=True)
        # The host is part of what the client has signed, so it stays.
        headers = {name: value for name, value in request.headers.items() if name not in ("Expect", "Connection")}
        headers.pop("Transfer-Encoding", None)
        if self._signer and headers.pop("If-None-Match", None):
            unsigned = {name: value for name, value in headers.items() if name != "Authorization"}
            again = AWSRequest(request.method, f"http://{request.host}{request.raw_path}", unsigned, body)
            self._signer.add_auth(again)
            headers = dict(again.headers.items())
        async with self._session.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            content = await answer.read()
            kept = {k: v for k, v in answer.headers.items() if k not in ("Transfer-Encoding", "Connection", "Date")}
            return answer.status, kept, content

    async def _dribble(
        self, request: web.Request, status: int, headers: dict[str, str], content: bytes, cut: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(content))})
        await response.prepare(request)
        if cut:
            await response.write(content[: len(content) // 2])
            return self._hang_up(request)
        size = max(1, len(content) // SLOW_PIECES)
        for start in range(0, len(content), size):
            await asyncio.sleep(SLOW_PIECE_S)
            await response.write(content[start : start + size])
        return response

    async def _call(self, fault: Fault, call: Callable[[], object]) -> None:
        killed = await self._loop.run_in_executor(self._pool, call)
        fault.killed += killed if isinstance(killed, int) else 0

    async def _kill(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        peer = request.transport.get_extra_info("peername") if request.transport else None
        if peer is not None:
            await self._call(fault, partial(_kill_owner, peer[1]))
        return self._hang_up(request)

    def _hang_up(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=502)

    def _concerns(self, request: web.Request) -> bool:
        return f"{self._run}/" in unquote(request.raw_path)

    def _fault(self, kind: str) -> Fault | None:
        """Count a request; the fault that hits it, if one does."""
        self.counts[kind] += 1
        for fault in self._faults:
            count = self.counts.total() if fault.operation == ANY else self.counts[kind]
            if fault.operation in (kind, ANY) and fault.nth <= count and fault.hits < fault.times:
                fault.hits += 1
                return fault
        return None


def _kill_owner(port: int) -> int:
    """SIGKILL for the process, other than this one, that has a connection open from a port; how many there were."""
    owners = {
        connection.pid
        for connection in psutil.net_connections(kind="tcp4")
        if connection.laddr and connection.laddr.port == port and connection.pid not in (None, os.getpid())
    }
    for pid in owners:
        os.kill(pid, signal.SIGKILL)
    return len(owners)


def key(path: str) -> str:
    """A URL of the bucket."""
    return f"s3://{BUCKET}/{path}"
