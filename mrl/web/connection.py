"""One connection of a caller: uvicorn parses it, and this file limits how long it may take.

A caller sends the head of a request, then its body, waits, and receives the answer; some keep the
connection for a further request. Each of these stages but the wait has a time limit and a limit on
the number of callers in it. A caller whose head names no known caller never gets past the first
stage, so it cannot displace callers that may call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from mrl.web.limits import TOO_MANY
from mrl.web.stages import Callers, Stage

LINGER_S, MAX_UNWANTED_BYTES = 1.0, 1 << 20
"""How long, and how much, is still read after a request was refused. If a connection is closed while
bytes are unread, the system resets it, and the caller may notice the reset before the answer."""
MAX_ERROR_CHARS = 2000
LOGGER = logging.getLogger("mrl.web")
LOGGER.setLevel(logging.ERROR)  # what a caller does wrong is answered, and not logged
LOGGER.addFilter(lambda record: not _is_cancelled(record))


def protocol_of(callers: Callers) -> type[asyncio.Protocol]:
    """Return the class of uvicorn's protocols. Each passes its events on to a `Connection`."""

    class Protocol(asyncio.Protocol):
        def __init__(self, **given: Any) -> None:
            self._connection = Connection(callers=callers, **given)

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self._connection.connection_made(transport)

        def data_received(self, data: bytes) -> None:
            self._connection.data_received(data)

        def eof_received(self) -> bool:
            return self._connection.end_received()

        def connection_lost(self, exc: Exception | None) -> None:
            self._connection.connection_lost(exc)

        def pause_writing(self) -> None:
            self._connection.pause_writing()

        def resume_writing(self) -> None:
            self._connection.resume_writing()

    return Protocol


class Connection(H11Protocol):
    """A connection whose stages are limited. The application finds it as `connection` in the state
    of a request's scope."""

    _inner: asyncio.Transport

    def __init__(self, *, callers: Callers, app_state: dict[str, Any], **more: Any) -> None:
        super().__init__(app_state={**app_state, "connection": self}, **more)
        self.logger = LOGGER
        self._callers, self._limits = callers, callers.limits
        self._stage: Stage | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._start = 0.0
        """When the caller began to send its request, on the clock of the loop."""
        self.is_hung_up = self._has_ended = False
        self._num_unwanted = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family != socket.AF_UNIX:
            # Otherwise the body of an answer would wait 40 ms for an acknowledgement.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(0)  # so that `resume_writing` means that all is sent
        self._inner = transport
        super().connection_made(_Transport(transport, self))
        self._begin()

    def let_in(self) -> None:
        """Wait for the rest of the request, whose head names a caller that may call."""
        if self.cycle.more_body:
            self._enter("body", self._start + self._limits.request_s)
        else:
            self._wait()

    def is_read(self) -> bool:
        """Return whether the whole request has arrived."""
        return not self.cycle.more_body

    def has_more(self) -> bool:
        """Return whether bytes have arrived that do not belong to the request."""
        return bool(self.conn.trailing_data[0])

    def data_received(self, data: bytes) -> None:
        if self.is_hung_up:
            self._num_unwanted += len(data)
            if self._num_unwanted > MAX_UNWANTED_BYTES:
                self.transport.abort()
            return
        if self._stage == "idle" or (self._stage == "answer" and self.cycle.response_complete):
            self._begin()
        is_first = self.cycle is None and not self.has_more()
        if is_first and not data[:1].isupper():
            self.refuse(400, "the first line is not METHOD /PATH HTTP/1.1")
            return
        super().data_received(data)
        if self._stage == "body" and not self.cycle.more_body:
            self._wait()

    def end_received(self) -> bool:
        """Record that the caller sends no more. Return whether the connection stays open, because the
        caller still gets an answer."""
        self._has_ended = True
        if self.is_hung_up or self._stage == "idle":
            return False
        if not self._callers.answers_half_closed:
            return False
        if self._stage == "answer" and self.cycle.response_complete:
            self.hang_up(is_read=True)
        elif self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self.refuse(400, "the connection ended before the request did")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self.is_hung_up = True
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._start = self.loop.time()
        super().on_response_complete()
        if not self.is_hung_up and self.cycle.response_complete:
            if self._has_ended:
                self.hang_up(is_read=True)
            elif self.transport.get_write_buffer_size():
                self._enter("answer", self.loop.time() + self._limits.answer_s)
            else:
                self._enter("idle", None)  # uvicorn closes it after `idle_s`

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stage is None and not self.is_hung_up:  # the application is still sending
            self._enter("answer", self.loop.time() + self._limits.answer_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stage == "answer" and not self.is_hung_up:
            if self.cycle.response_complete:
                self._enter("idle", None)
            else:
                self._leave()

    def shutdown(self) -> None:
        if self.cycle is None or self.is_hung_up:
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP; h11's error is the one that is being handled."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        status = 411 if status == 501 else status  # another Transfer-Encoding than chunked
        if status == 431:
            why = f"the head of the request has more than {self._limits.head_bytes} bytes"
        else:
            why = f"not a request of HTTP/1.1: {error or msg}"
        self.refuse(status, why)

    def turn_away(self) -> None:
        """End the present stage, because too many callers are in it."""
        if self._stage in ("head", "body"):
            self.refuse(503, TOO_MANY)
        elif self._stage == "answer":
            self._leave()
            self.transport.abort()
        else:
            self.transport.close()

    def refuse(self, status: int, why: str) -> None:
        """Answer a request that does not reach the application, or only in part, and hang up."""
        if self.is_hung_up:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # the application reads no more
            self.cycle.message_event.set()
        body = json.dumps(self._callers.as_error(status, one_line(why))).encode() + b"\n"
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.hang_up(is_read=False)

    def hang_up(self, *, is_read: bool) -> None:
        """Close the connection once the answer is sent. Unless the request has been read, the caller
        may still be sending; what arrives within a short time is dropped."""
        if self.is_hung_up:
            return
        self._leave()
        self.is_hung_up = True
        inner = self._inner
        is_sent = not inner.get_write_buffer_size()
        if is_read or self._has_ended:
            inner.close()
        else:
            inner.write_eof()
            inner.resume_reading()
        if not is_sent:
            self._enter("answer", self.loop.time() + self._limits.answer_s)
        elif not is_read:
            self._timer = self.loop.call_later(LINGER_S, inner.abort)

    def _begin(self) -> None:
        """Wait for the head of a request."""
        self._start = self.loop.time()
        self._enter("head", self._start + self._limits.head_s)

    def _wait(self) -> None:
        """Wait for the application. The caller may still have to take the answer to an earlier request,
        which the next answer waits for."""
        if self._inner.get_write_buffer_size():
            self._enter("answer", self.loop.time() + self._limits.answer_s)
        else:
            self._leave()

    def _enter(self, stage: Stage, end: float | None) -> None:
        self._leave()
        self._stage = stage
        self._callers.enter(self, stage)
        if end is not None:
            self._timer = self.loop.call_at(end, self._too_late)

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stage is not None:
            self._callers.leave(self, self._stage)
            self._stage = None

    def _too_late(self) -> None:
        if self._stage == "answer":
            self.transport.abort()
        else:
            self.refuse(408, "the request did not arrive in time; send it at once")


class _Transport(asyncio.Transport):
    """A transport for uvicorn whose `close` lets the caller read its answer first."""

    def __init__(self, inner: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._inner, self._connection = inner, connection

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._inner.write(data)

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        cycle = self._connection.cycle
        self._connection.hang_up(is_read=cycle is not None and not cycle.more_body)

    def is_closing(self) -> bool:
        return self._connection.is_hung_up or self._inner.is_closing()


def _is_cancelled(record: logging.LogRecord) -> bool:
    """Return whether a record is of a request that was cancelled because the server stops."""
    return record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)


def one_line(why: object) -> str:
    return " ".join(str(why).split())[:MAX_ERROR_CHARS]
