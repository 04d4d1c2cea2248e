"""The caller's connection with somebody between: what a stage does to it goes on to the connection itself."""

from typing import Any

from api.inference.job import Client


class PassThrough:
    """Hands everything on but the answer, whose parts are for whoever stands between to hear."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def gone(self) -> bool:
        return self._client.gone

    @property
    def streaming(self) -> bool:
        return self._client.streaming

    @property
    def settling(self) -> bool:
        return self._client.settling

    @settling.setter
    def settling(self, value: bool) -> None:
        self._client.settling = value

    def attach(self, flow: Any) -> None:
        self._client.attach(flow)

    def abandon(self) -> None:
        self._client.abandon()

    def begin_stream(self, extra: bytes) -> None:
        self._client.begin_stream(extra)
