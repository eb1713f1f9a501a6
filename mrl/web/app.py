"""An API of JSON over HTTP: an ASGI application made from a table of addresses.

A request reaches the function of its address only if it does not come from a web page, its caller may
call, and its body is within the limits. The function runs in a thread. All errors have one form.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import anyio
import anyio.to_thread
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mrl.version import __version__
from mrl.web.callers import check_head
from mrl.web.connection import one_line
from mrl.web.limits import TOO_MANY, Limits, NotYet, Refused
from mrl.web.openapi import Address, describe
from mrl.web.reading import read_content, read_object
from mrl.web.server import CLOSE

FIRST_LOOK_S, LAST_LOOK_S = 0.1, 1.0
"""Seconds between two calls of a function that raises NotYet, at first and at last."""
BEARER = {"type": "http", "scheme": "bearer"}
"""The scheme of OpenAPI for a token in the header Authorization."""


@dataclass(frozen=True)
class Rules:
    """How an API takes requests and answers them."""

    title: str
    docs: str
    """The page that lists the addresses."""
    allow: Callable[[Headers, str], str | None]
    """Takes the headers and the path of a request, and returns the name of the caller; None if the
    path is open to callers without a name. Raises Refused if the caller may not call. It is called in
    the thread of the server, so it must not wait."""
    security: dict[str, Any] | None = None
    """OpenAPI's scheme by which callers identify themselves."""
    error_key: str = "error"
    """The key of an error's text in an answer."""
    statuses: Mapping[type[Exception], int] = field(default_factory=dict[type[Exception], int])
    """Statuses of foreseen errors, by class; a class may be a base class."""
    encodings: tuple[str, ...] = ()
    """The encodings of a body, such as "zstd"."""
    is_strict: bool = False
    """Answer one request per connection, and refuse queries, a body of GET, and bodies in chunks."""
    needs_length: bool = False
    """Refuse a POST without a Content-Length."""


@dataclass(frozen=True)
class Incoming:
    """A request whose caller may call."""

    since: float
    """When its head had arrived, on the clock of `time.monotonic`."""
    owner: str
    """The name of the caller; empty where callers have none."""
    headers: Headers
    path: dict[str, str]
    query: dict[str, str]
    content: bytes
    """The body, decompressed."""
    depth: int
    """Maximum depth to which objects and lists may be nested in a body."""

    def json(self) -> dict[str, Any]:
        """Return the object in the body; empty if there is no body. Raises Refused."""
        return read_object(self.content, self.depth) if self.content.strip() else {}


Call = Callable[[Incoming], Any]
"""Answers a request: with an object, with a status and an object, or with a Response. If it is a
coroutine function, it runs in the thread of the server and must not block."""


@dataclass(frozen=True)
class _Action:
    call: Call
    most: int
    """Maximum number of bytes of the body."""


class Api:
    """A table of addresses, and the application that answers them. `as_json` writes an answer."""

    def __init__(
        self,
        rules: Rules,
        limits: Limits,
        as_json: Callable[[Any], bytes] = lambda answer: json.dumps(answer).encode() + b"\n",
    ) -> None:
        self.rules, self._limits, self._as_json = rules, limits, as_json
        self.addresses: list[Address] = []
        self._paths: dict[str, dict[str, _Action]] = {}
        self._threads = anyio.CapacityLimiter(limits.threads)
        self._num_answered = 0

    def add(
        self,
        method: str,
        path: str,
        call: Call,
        *bodies: type[BaseModel],
        needs_body: bool = True,
        query: tuple[str, ...] = (),
        most: int | None = None,
        is_described: bool = True,
    ) -> None:
        """Add an address. `bodies` are the forms of its body, which only the description shows. `most`
        is the maximum number of bytes of a body; None means `limits.body_bytes`."""
        if is_described:
            self.addresses.append(Address(method, path, bodies, needs_body, query))
        action = _Action(call, self._limits.body_bytes if most is None else most)
        self._paths.setdefault(path, {})[method] = action

    def describe_at(self, path: str) -> None:
        """Serve the description of all addresses in the form of OpenAPI."""
        self.add("GET", path, lambda incoming: self.description, is_described=False)

    @cached_property
    def description(self) -> dict[str, Any]:
        """The description of all addresses in the form of OpenAPI."""
        rules = self.rules
        return describe(
            rules.title,
            __version__,
            self.addresses,
            security=rules.security,
            error_key=rules.error_key,
        )

    @property
    def asgi(self) -> Callable[..., Any]:
        """The application."""
        routes = [Route(path, _Endpoint(self, actions)) for path, actions in self._paths.items()]
        inner = Starlette(routes=routes, exception_handlers={404: self._nowhere})
        inner.router.redirect_slashes = False

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            await self._guard(inner, scope, receive, send)

        return guarded

    async def _guard(self, inner: Any, scope: Any, receive: Any, send: Any) -> None:
        """Pass on a request whose caller may call; answer any other with the reason."""
        request, connection = Request(scope), scope.get("state", {}).get("connection")
        closes = [True]

        async def sending(message: Any) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and closes[0]:
                message = {**message, "headers": [*message["headers"], CLOSE]}
            await send(message)

        try:
            target = scope.get("raw_path", b"") + scope["query_string"]
            check_head(scope["http_version"], target, scope["headers"], self._limits)
            self._check_form(request)
            owner = self.rules.allow(request.headers, scope["path"])
            self._check_room()  # before the body is sent
        except Exception as error:
            await self.refusal(error)(scope, receive, sending)
            return
        if owner is not None and connection is not None:
            connection.let_in()
        closes[0] = self.rules.is_strict or owner is None
        inner_scope = {**scope, "state": {**scope.get("state", {}), "owner": owner or ""}}
        with suppress(ClientDisconnect):
            await inner(inner_scope, receive, sending)

    def _check_form(self, request: Request) -> None:
        rules, headers = self.rules, request.headers
        if (rules.is_strict or rules.needs_length) and "transfer-encoding" in headers:
            raise Refused(411, "send the body with a Content-Length, and not in chunks")
        if rules.needs_length and request.method == "POST" and "content-length" not in headers:
            raise Refused(411, "expected the length of the body in the header Content-Length")
        if rules.is_strict and (query := request.scope["query_string"]):
            raise Refused(400, f"expected no query, got {query[:80].decode('latin-1')!r}")

    def _check_room(self) -> None:
        if self._num_answered >= self._limits.connections:
            raise Refused(503, TOO_MANY)

    @contextmanager
    def _answering(self) -> Any:
        self._check_room()
        self._num_answered += 1
        try:
            yield
        finally:
            self._num_answered -= 1

    async def answer(self, request: Request, actions: Mapping[str, _Action]) -> Response:
        """Return the answer to a request whose path is known."""
        since = time.monotonic()
        try:
            if (action := actions.get(request.method)) is None:
                why = f"expected {' or '.join(actions)}, got {request.method}"
                response = self.refusal(Refused(405, why))
                response.headers["Allow"] = ", ".join(actions)
                return response
            most, encodings = action.most, self.rules.encodings
            content = await read_content(request, most, encodings=encodings)
            if self.rules.is_strict:
                _check_strictly(request, content)
            incoming = Incoming(
                since,
                request.state.owner,
                request.headers,
                dict(request.path_params),
                dict(request.query_params),
                content,
                self._limits.depth,
            )
            with self._answering():
                return await self._called(action.call, incoming)
        except ClientDisconnect:
            raise
        except Exception as error:
            return self.refusal(error)

    async def _called(self, call: Call, incoming: Incoming) -> Response:
        if inspect.iscoroutinefunction(call):
            return self._response(await call(incoming))
        end, pause_s, loop = None, FIRST_LOOK_S, asyncio.get_running_loop()
        while True:
            try:
                return await self.in_thread(lambda: self._response(call(incoming)))
            except NotYet as later:
                end = loop.time() + later.limit_s if end is None else end
                if loop.time() > end:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_LOOK_S)

    async def in_thread(self, call: Callable[[], Any]) -> Any:
        """Call a function in one of the threads of this API."""
        return await anyio.to_thread.run_sync(call, limiter=self._threads)

    def _response(self, found: Any) -> Response:
        if isinstance(found, Response):
            return found
        status, answer = found if isinstance(found, tuple) else (200, found)
        content = self._as_json({} if answer is None else answer)
        return Response(content, status, media_type="application/json")

    def refusal(self, error: Exception) -> Response:
        """Return the answer to a request that raised an error."""
        if isinstance(error, Refused):
            status, why = error.status, one_line(error)
        else:
            kinds = [kind for kind in type(error).__mro__ if kind in self.rules.statuses]
            status = self.rules.statuses[kinds[0]] if kinds else 500
            why = one_line(error)
        if status == 500:
            traceback.print_exception(error)
            why = f"{type(error).__name__}, which mrl does not foresee; see its log"
        response = self._response((status, {self.rules.error_key: why}))
        if status == 401 and self.rules.security == BEARER:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    async def _nowhere(self, request: Request, error: Exception) -> Response:
        what = f"{request.method} {request.scope['path'][:80]}"
        return self.refusal(
            Refused(404, f"there is no {what} here; {self.rules.docs} lists the addresses")
        )


def _check_strictly(request: Request, content: bytes) -> None:
    connection = getattr(request.state, "connection", None)
    if connection is not None and connection.has_more():
        raise Refused(400, "more bytes follow than the Content-Length")
    if content and request.method == "GET":
        raise Refused(400, "GET takes no body here")


class _Endpoint:
    """The application of one path, which is an ASGI application so that it gets every method."""

    def __init__(self, api: Api, actions: Mapping[str, _Action]) -> None:
        self._api, self._actions = api, actions

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        response = await self._api.answer(Request(scope, receive), self._actions)
        await response(scope, receive, send)
