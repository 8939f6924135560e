"""Limits of a reward server's connections: how many there are, and how long one may take to send a request's head.

uvicorn, on which vLLM's server runs, limits neither.
"""

import asyncio

import h11
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.h11_impl import H11Protocol

from configs.http_limits import most_connections

HEAD_S = 10.0
"""Time from the connection's start or the head's first byte on."""
MOST_CONNECTIONS = 4096


class LimitedConnection(H11Protocol):
    """A connection of uvicorn with these limits."""

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
    """Have each HTTP server of uvicorn that this process starts limit its connections."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedConnection.__name__}"
