"""Limits a reward server's connections and their time for a request's head; uvicorn limits neither."""

import asyncio

import h11
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.h11_impl import H11Protocol

from configs.http_limits import most_connections

HEAD_S = 10.0
"""Time for a request's head, from the connection's start or the head's first byte."""
MOST_CONNECTIONS = 4096


class LimitedConnection(H11Protocol):
    _late: asyncio.TimerHandle | None = None
    """Closes the connection unless a head is there before."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections(MOST_CONNECTIONS):
            transport.abort()
            return
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._late is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def limit_connections() -> None:
    """Applies to uvicorn's HTTP servers in this process."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedConnection.__name__}"
