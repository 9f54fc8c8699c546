"""An HTTP server whose clients cannot use it up: bounds for connections, headers, and readers and writers that stand still.

uvicorn on its own waits without end for the rest of a request's headers and for a reader that takes nothing.
"""

import asyncio
import logging
import math
from typing import Any, Final

import h11
from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS: Final = 64
LONGEST_HEADERS: Final = 32 << 10
LONGEST_HEADERS_S: Final = 10.0
"""How long a connection may take until the headers of its next request are there."""
LONGEST_STANDSTILL_S: Final = 30.0
"""How long a reader may take nothing of an answer."""
MOST_UNSENT_BYTES: Final = 32 << 10
_PIECE: Final = 4 << 10

log = logging.getLogger("ttlaunch.web")


class BoundedProtocol(H11Protocol):
    """One connection. Past the limit of connections, the one that has waited longest without a request gives way."""

    headers_due: asyncio.TimerHandle | None = None
    """Ends the connection if its next request's headers are not there by then; none while a request is answered."""
    _reading_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MOST_UNSENT_BYTES)
        self._await_headers()
        if len(self.connections) > MOST_CONNECTIONS:
            waiting = [one for one in self.connections if isinstance(one, BoundedProtocol)]
            longest = min(waiting, key=BoundedProtocol.due)  # this one at worst: never one whose request is answered
            self.connections.discard(longest)  # it is lost a moment later, and must not be chosen or counted again
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        # h11 bounds only headers of which a part is missing, so what arrives at once is handed over in pieces.
        for at in range(0, len(data), _PIECE):
            super().data_received(data[at : at + _PIECE])
            if self.transport.is_closing():
                return
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._end_headers_due()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_headers_due()
        self._end_reading_due()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_due = self.loop.call_later(LONGEST_STANDSTILL_S, self._end_standstill)

    def resume_writing(self) -> None:
        self._end_reading_due()
        super().resume_writing()

    def due(self) -> float:
        """When this connection ends unless its next request arrives; never while one is answered."""
        return self.headers_due.when() if self.headers_due is not None else math.inf

    def _await_headers(self) -> None:
        if self.headers_due is None:
            self.headers_due = self.loop.call_later(LONGEST_HEADERS_S, self.transport.abort)

    def _end_headers_due(self) -> None:
        if self.headers_due is not None:
            self.headers_due.cancel()
            self.headers_due = None

    def _end_reading_due(self) -> None:
        if self._reading_due is not None:
            self._reading_due.cancel()
            self._reading_due = None

    def _end_standstill(self) -> None:
        log.warning("closed a connection: its client read nothing for %g s", LONGEST_STANDSTILL_S)
        self.transport.abort()


def make_server(app: ASGIApp, **settings: Any) -> Server:
    """Make a server for an application; call `serve(sockets=[...])` with sockets that listen already.

    Args:
        app: What answers the requests.
        settings: Further settings of `uvicorn.Config`.
    """
    return Server(
        Config(
            app,
            http=BoundedProtocol,
            ws="none",
            loop="asyncio",
            interface="asgi3",
            proxy_headers=False,  # nobody stands in front, so that nobody's word on who asks is taken
            server_header=False,
            access_log=False,
            log_config=None,
            log_level="error",  # a request that is none is answered, and is no news
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
            limit_concurrency=MOST_CONNECTIONS + 1,
            h11_max_incomplete_event_size=LONGEST_HEADERS,
            **settings,
        )
    )
