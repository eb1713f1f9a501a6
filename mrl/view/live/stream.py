"""The events of a page as an HTTP answer that does not end: server-sent events.

A browser that reads slowly delays nobody: its answer waits, and then goes on with the events that are
still kept, or with `reset`. One that reads nothing for STALLED_S seconds is hung up on, and its page
connects again when it runs again. A sign of life every ALIVE_S seconds keeps the connection open where
something between closes idle ones, and tells the page that it is connected.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from mrl.view.live.feed import Event, Feed

ALIVE_S = 5.0
STALLED_S = 20.0
MAX_TEXT = 1 << 16
"""Events are sent together until they have so many characters."""
RETRY_MS = 1000
"""Milliseconds after which a browser connects again."""
LOOK_S = 0.2
"""Seconds between two checks whether a stalled answer is to end."""
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}


class EventStream(Response):
    """Answers with the events of a feed after the event `last`, which is an id of this feed; with a
    `reset` first if it is another one."""

    def __init__(self, feed: Feed, last: str, ended: Callable[[], None]) -> None:
        """`ended` is called when the answer is over."""
        super().__init__(headers=HEADERS)
        self._feed, self._ended = feed, ended
        epoch, _, number = last.partition(".")
        is_own = epoch == feed.epoch and number.isascii() and number.isdigit() and len(number) < 16
        self._number = int(number) if is_own else -1

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        loop, wakes = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(wakes.set)

        end_listening = self._feed.listen(wake)
        gone = asyncio.create_task(_disconnected(receive))
        try:
            headers = [h for h in self.raw_headers if h[0] != b"content-length"]
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            await self._send(send, start)
            await self._write(send, f"retry: {RETRY_MS}\n{_alive()}")
            while not gone.done():
                wakes.clear()
                if text := self._news():
                    await self._write(send, text)
                    continue
                if self._feed.is_closed:
                    await self._write(send, "event: bye\ndata: {}\n\n")
                    await self._send(send, {"type": "http.response.body", "body": b""})
                    return
                waiting = asyncio.create_task(wakes.wait())
                await asyncio.wait({waiting, gone}, timeout=ALIVE_S, return_when="FIRST_COMPLETED")
                if not waiting.done():
                    waiting.cancel()
                    await self._write(send, _alive())
        except TimeoutError:
            connection = scope.get("state", {}).get("connection")
            if connection is not None:
                connection.transport.abort()
        finally:
            gone.cancel()
            end_listening()
            self._ended()

    def _news(self) -> str:
        """Return the next events that the browser lacks as text, and count them as sent."""
        events = self._feed.after(self._number)
        if events is None:
            self._number = self._feed.number
            events = [Event(self._number, "reset", "{}")]
        texts, size = [], 0
        for event in events:
            place = f"{self._feed.epoch}.{event.number}"
            texts.append(f"id: {place}\nevent: {event.kind}\ndata: {event.data}\n\n")
            self._number, size = event.number, size + len(texts[-1])
            if size > MAX_TEXT:
                break
        return "".join(texts)

    async def _write(self, send: Any, text: str) -> None:
        body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
        await self._send(send, body)

    async def _send(self, send: Callable[[Any], Awaitable[None]], message: Any) -> None:
        """Send a message. Raises TimeoutError if the browser takes no bytes for too long, or does not
        take them while the feed is closed."""
        task = asyncio.ensure_future(send(message))
        end = asyncio.get_running_loop().time() + STALLED_S
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                is_late = self._feed.is_closed or asyncio.get_running_loop().time() > end
                if not task.done() and is_late:
                    raise TimeoutError
            task.result()
        finally:
            task.cancel()


def _alive() -> str:
    return f"event: alive\ndata: {json.dumps({'now': time.time()})}\n\n"


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
