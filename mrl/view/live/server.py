"""Serves a live page on loopback: the addresses, the token, and the thread that looks at the files.

GET /            the page as HTML
GET /state       what it shows, as JSON
GET /events      what changes, as server-sent events
GET /samples     the samples of a step: ?step=N
GET /sample      one of them: ?step=N&number=N, and &raw=1 for its text as it is

In the page of a service, `tenant=NAME` in the query stands for the page of the tenant's run. The token
is in the query, too, because a cookie would also be sent to other ports of this machine, which may
belong to other users. Everything is refused that does not have it, that names another host than this
machine (as after DNS rebinding), or that another page requests.
"""

from __future__ import annotations

import getpass
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response

from mrl.errors import InputError, RunFailed
from mrl.system.processes import Closing
from mrl.view.live.compare_page import ComparePage
from mrl.view.live.pages import LivePage, as_json
from mrl.view.live.run_page import RunPage
from mrl.view.live.service_page import ServicePage
from mrl.view.live.stream import EventStream
from mrl.view.render import LIVE, render
from mrl.view.service import is_service
from mrl.web.app import BEARER, Api, Incoming, Rules
from mrl.web.callers import has_token, is_of_this_machine
from mrl.web.limits import TOO_MANY, Limits, Refused
from mrl.web.server import HttpServer

POLL_S = 0.25
"""Seconds between two looks at the files."""
MAX_STREAMS = 64
"""The most browsers that are sent events at a time."""
UNWATCHED_S = 300.0
"""A tenant's page that no browser has open for so long is closed."""
LIMITS = Limits(answer_s=120.0, idle_s=60.0, stop_s=2, connections=64, threads=8, unread=256)
"""A browser may be far away, behind a slow connection of ssh."""
SECURITY = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
NUMBER = re.compile("[0-9]{1,15}")


class Pages:
    """The page that was asked for and, if it is a service, the pages of its tenants. A thread polls
    them until `close`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises InputError if the folders cannot be compared, or one of them is a file."""
        for folder in folders:
            if folder.exists() and not folder.is_dir():
                raise InputError(
                    f"{folder} is not a folder; give the output_dir of a run or a service"
                )
        self._folder = folders[0]
        self.main = ComparePage(folders) if len(folders) > 1 else self._page_of_folder()
        self._tenants: dict[str, tuple[LivePage, float]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="follow")
        self.main.poll()
        self._thread.start()

    def _page_of_folder(self) -> LivePage:
        return ServicePage(self._folder) if is_service(self._folder) else RunPage(self._folder)

    def get(self, tenant: str = "") -> LivePage:
        """Return the page, or that of a tenant. Raises Refused if there is none."""
        if not tenant:
            return self.main
        service = self.main
        known = service.tenants.get(tenant) if isinstance(service, ServicePage) else None
        if not isinstance(service, ServicePage) or known is None:
            raise Refused(404, f"there is no tenant {tenant[:80]!r}")
        with self._lock:
            page = self._tenants.get(tenant, (None, 0.0))[0]
            if not isinstance(page, RunPage) or page.folder != Path(known.output_dir):
                if page is not None:
                    page.feed.close()
                page = RunPage(Path(known.output_dir), tenant, lambda: service.of_tenant(tenant))
                page.poll()
            self._tenants[tenant] = page, time.monotonic()
            return page

    def close(self) -> None:
        """Stop polling, and end all streams."""
        self._stop.set()
        with self._lock:
            pages = [self.main, *(page for page, _ in self._tenants.values())]
        for page in pages:
            page.feed.close()
        self._thread.join(1.0)  # it may wait for a disk

    def _run(self) -> None:
        while not self._stop.wait(0.01 if self.main.is_behind else POLL_S):
            if isinstance(self.main, RunPage) and is_service(self._folder):
                former, self.main = self.main, self._page_of_folder()
                self.main.poll()
                former.feed.publish("reload", {})
            self.main.poll()
            with self._lock:
                for name, (page, at) in list(self._tenants.items()):
                    if page.feed.num_listeners:
                        self._tenants[name] = page, time.monotonic()
                    elif time.monotonic() - at > UNWATCHED_S:
                        page.feed.close()
                        del self._tenants[name]
                pages = [page for page, _ in self._tenants.values()]
            for page in pages:
                page.poll()


class LiveServer(Closing):
    """Serves the page of some folders on a port of loopback, from its construction until `close`.

    Raises InputError if the folders cannot be shown, or the port is in use.
    """

    def __init__(self, folders: Sequence[Path], port: int = 0, limits: Limits = LIMITS) -> None:
        self.token = secrets.token_urlsafe(24)
        self._num_streams = 0
        with ExitStack() as undo:
            listener = undo.enter_context(_listening(port))
            self.port = listener.getsockname()[1]
            self.pages = Pages(folders)
            undo.callback(self.pages.close)
            self._http = undo.enter_context(
                HttpServer(_with_token(self._api(limits)), listener, limits, name="the page")
            )
            undo.callback(self.pages.close)  # first of all, so that no stream holds the server up
            self._undo = undo.pop_all()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/?{urlencode({'token': self.token})}"

    @property
    def forward(self) -> str:
        """The command that makes the address work on another machine."""
        here = f"{_user()}@{socket.gethostname()}"
        return f"ssh -N -L {self.port}:127.0.0.1:{self.port} {here}"

    def serve(self) -> None:
        """Wait for an exception in this thread, such as KeyboardInterrupt."""
        while self._http.is_alive:
            time.sleep(0.5)
        raise RunFailed("the server of the page has ended; the lines above say why")

    def close(self) -> None:
        """End all streams, and free the port. May be called more than once."""
        self._undo.close()

    def _api(self, limits: Limits) -> Callable[..., Any]:
        rules = Rules("mrl view --follow", "docs/view.md", self._allow, security=BEARER)
        self._calls = api = Api(rules, limits, as_json)
        api.add("GET", "/", self._html)
        api.add("GET", "/state", lambda incoming: self._page(incoming).state())
        api.add("GET", "/events", self._events)
        api.add("GET", "/samples", self._samples)
        api.add("GET", "/sample", self._sample)
        return api.asgi

    def _allow(self, headers: Headers, path: str) -> str:
        host, origin = headers.get("host"), headers.get("origin")
        is_own = origin is not None and origin == f"http://{host}"
        if not is_of_this_machine(host, None if is_own else origin):
            raise Refused(403, "this page is for browsers on this machine, and not for other pages")
        if not has_token(headers.get("authorization"), self.token):
            raise Refused(
                401, "open the address that `mrl view --follow` has printed: it has a token"
            )
        return "browser"

    def _page(self, incoming: Incoming) -> LivePage:
        return self.pages.get(incoming.query.get("tenant", ""))

    def _html(self, incoming: Incoming) -> Response:
        page = self._page(incoming)
        back = "?" + urlencode({"token": self.token}) if "tenant" in incoming.query else ""
        state = page.state()
        data = {"folder": page.title, "state": "", "back": back, "kind": page.kind, **state}
        text = render(data, LIVE).encode("utf-8", errors="replace")
        return HTMLResponse(text)

    async def _events(self, incoming: Incoming) -> Response:
        page = await self._calls.in_thread(lambda: self._page(incoming))
        if self._num_streams >= MAX_STREAMS:
            raise Refused(503, TOO_MANY)
        self._num_streams += 1
        last = incoming.headers.get("last-event-id") or incoming.query.get("after", "")
        return EventStream(page.feed, last, self._end_stream)

    def _end_stream(self) -> None:
        self._num_streams -= 1

    def _samples(self, incoming: Incoming) -> Any:
        rollouts = self._rollouts(incoming)
        return _or_refused(lambda: rollouts.list(_number(incoming, "step")))

    def _sample(self, incoming: Incoming) -> Any:
        rollouts, is_raw = self._rollouts(incoming), incoming.query.get("raw") == "1"
        step, number = _number(incoming, "step"), _number(incoming, "number")
        return _or_refused(lambda: rollouts.sample(step, number, is_raw=is_raw))

    def _rollouts(self, incoming: Incoming) -> Any:
        if (rollouts := self._page(incoming).rollouts) is None:
            raise Refused(404, "this page has no samples; a tenant's page has")
        return rollouts


def _or_refused(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except InputError as error:
        raise Refused(404, str(error)) from None


def _number(incoming: Incoming, name: str) -> int:
    text = incoming.query.get(name, "")
    if not NUMBER.fullmatch(text):
        raise Refused(400, f"{name} is {text[:40]!r}; expected a number")
    return int(text)


def _with_token(app: Callable[..., Any]) -> Callable[..., Any]:
    """Return an application that takes the token from the query of a request as well as from its
    header, and says in each answer what a browser may do with it."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = [h for h in message["headers"] if h[0].lower() != b"cache-control"]
                message = {**message, "headers": [*given, *SECURITY]}
            await send(message)

        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        headers = scope["headers"]
        if len(tokens) == 1 and all(name != b"authorization" for name, _ in headers):
            bearer = f"Bearer {tokens[0]}".encode("latin-1", errors="replace")
            scope = {**scope, "headers": [*headers, (b"authorization", bearer)]}
        await app(scope, receive, sending)

    return wrapped


def _listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise InputError(
            f"--port {port}: {error.strerror}; choose another port, or leave it out for a free one"
        ) from None
    return listener


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        return "USER"
