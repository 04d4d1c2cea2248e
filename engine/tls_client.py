"""The same two nouns as `engine.client`, over aiohttp: for https engines, where its TLS is worth its price."""

import asyncio
import ssl
from typing import Any

import aiohttp

from engine.client import CONNECT_TIMEOUT_S, Call, Failure, Parts, Sink, Target

READ_SIZE = 64 * 1024


class _TlsFlight:
    """A call that is a task; `pause` stops its reading, and with it, by TCP, the engine."""

    def __init__(self, target: Target, sink: Sink) -> None:
        self.target = target
        self.sink = sink
        self.ended = False
        self.task: asyncio.Task[None] | None = None
        self.open = asyncio.Event()
        self.open.set()
        target.inflight += 1

    def abort(self) -> None:
        if not self.ended:
            self.ended = True
            self.target.inflight -= 1
            if self.task is not None:
                self.task.cancel()

    def pause(self) -> None:
        self.open.clear()

    def resume(self) -> None:
        self.open.set()

    def finish(self, failure: Failure | None) -> None:
        if not self.ended:
            self.ended = True
            self.target.inflight -= 1
            self.sink.on_end(failure)


class TlsClient:
    """One aiohttp session for all https engines of the process. Redirects are not followed."""

    def __init__(self, *, connections_max: int, context: ssl.SSLContext | None = None) -> None:
        """`context` trusts other authorities than the system's."""
        self._connections_max = connections_max
        self._context = context
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def send(
        self, target: Target, path: str, body: Parts, sink: Sink, *, request_id: str = "", credential: str = ""
    ) -> Call:
        flight = _TlsFlight(target, sink)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "X-Request-Id": request_id}
        if credential:
            headers["Authorization"] = f"Bearer {credential}"
        task = asyncio.get_running_loop().create_task(self._run(flight, path, b"".join(body), headers))
        flight.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return flight

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _session_now(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, limit_per_host=self._connections_max, ssl=self._context or True
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                auto_decompress=False,
                trust_env=True,
            )
        return self._session

    async def _run(self, flight: _TlsFlight, path: str, body: bytes, headers: dict[str, str]) -> None:
        started = False
        try:
            request: Any = self._session_now().post(
                flight.target.url + path, data=body, headers=headers, allow_redirects=False
            )
            async with request as response:
                started = True
                if flight.ended:
                    return
                flight.sink.on_head(
                    response.status,
                    response.headers.get("Content-Type", "").encode("latin-1"),
                    response.headers.get("Retry-After", "").encode("latin-1"),
                )
                while block := await response.content.read(READ_SIZE):
                    flight.sink.on_data(block)
                    await flight.open.wait()
            flight.finish(None)
        except aiohttp.ClientConnectorError:
            flight.finish(Failure.CONNECT)
        except (aiohttp.ClientError, TimeoutError, OSError):
            flight.finish(Failure.LOST if started else Failure.CONNECT)


class UpstreamClient:
    """What the gateway holds: picks the plain pool or the TLS client by the target."""

    def __init__(self, plain: Any, tls: TlsClient) -> None:
        self.plain = plain
        self.tls = tls

    def send(
        self, target: Target, path: str, body: Parts, sink: Sink, *, request_id: str = "", credential: str = ""
    ) -> Call:
        client = self.tls if target.https else self.plain
        call: Call = client.send(target, path, body, sink, request_id=request_id, credential=credential)
        return call
