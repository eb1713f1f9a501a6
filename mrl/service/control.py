"""The control socket of a service, through which users add, pause, resume, remove and list tenants.

    POST   /tenants               {"name": ..., "recipe": {...}, "weight": 1.0, "is_record": false,
                                   "loop": "recipe", "key": ...}
    GET    /tenants
    GET    /tenants/NAME
    POST   /tenants/NAME/pause    {"reason": ..., "sequence": ...}, which may be left out
    POST   /tenants/NAME/resume   {"sequence": ...}
    DELETE /tenants/NAME          {"sequence": ...}
    POST   /tenants/NAME/operations     {"kind": ...}, for a session
    GET    /tenants/NAME/operations/ID
    POST   /tokenizer/encode      {"texts": [...]}; also encode_chat and decode
    GET    /engines               also POST and DELETE (mrl/engine_pool/elastic/control.py)
    GET    /metrics
    GET    /openapi.json

Threads of rank 0 answer the requests. Before a request for a change is answered, the change is in
the registry and on disk. The loop of the service reads the change from the registry.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

from starlette.datastructures import Headers

from mrl.engine_pool.elastic.control import add_engine_calls
from mrl.engine_pool.elastic.membership import Membership, NoEngine
from mrl.errors import DiskFailed, InputError
from mrl.run.json_lines import finite_or_null
from mrl.service.bodies import POSTED, Change, NewTenant, Pause, read_new
from mrl.service.record import State, Tenant, check_name, describe
from mrl.service.registry import NoTenant, Registry, WrongState
from mrl.service.sessions.bodies import Bounds, read_body
from mrl.service.sessions.operations import NoOperation, OtherLife, TooMany
from mrl.service.sockets import open_tcp, read_token
from mrl.service.tokenizer import BODIES, ServiceTokenizer
from mrl.system.processes import Closing
from mrl.web.app import BEARER, Api, Incoming, Rules
from mrl.web.callers import has_token, is_of_this_machine
from mrl.web.limits import Limits, Refused
from mrl.web.server import HttpServer
from mrl.web.unix_socket import SOCKET, open_unix
from parallel.hf_config import HfModel

REASON = "a user paused it"
NO_ENGINES = (
    "this service has no engines on ranks of their own yet: they share the devices of the trainer "
    "(rollout.placement=colocated), or the service is starting"
)
KEY = re.compile("[A-Za-z0-9_-]{1,64}")
"""The form of an idempotency key, by which a repeated request to post an operation or add a tenant
is recognized."""
STATUSES: dict[type[Exception], int] = {
    InputError: 400,
    NoEngine: 404,
    NoTenant: 404,
    NoOperation: 404,
    WrongState: 409,
    OtherLife: 409,
    TooMany: 429,
    DiskFailed: 507,
}
"""HTTP statuses by class of error."""
Answer = tuple[int, dict[str, Any]]


class Control(Closing):
    """The server of the control socket. It listens from its construction until `close()`. Raises
    InputError if it cannot listen."""

    def __init__(self, registry: Registry, limits: Limits | None = None) -> None:
        self.registry = registry
        self._calls, self._limits = Calls(registry), limits or Limits()
        tcp = registry.service.control.tcp
        with ExitStack() as undo:
            try:
                listener = open_unix(registry.root)
            except OSError as error:
                raise InputError(
                    f"cannot listen at {registry.root / SOCKET}: {error.strerror or error}; expected "
                    "a folder that can be written, with nothing of that name but an old socket"
                ) from None
            undo.callback((registry.root / SOCKET).unlink, missing_ok=True)
            self._listen(undo, listener, None)
            if tcp is not None:
                self._listen(undo, open_tcp(tcp), read_token(registry.root))
            self._undo = undo.pop_all()

    def _listen(self, undo: ExitStack, listener: socket.socket, token: str | None) -> None:
        """Answer the callers of a socket, who must send the token if there is one. Each socket has
        limits of its own."""
        undo.enter_context(listener)
        app = self._calls.application(token, self._limits)
        undo.enter_context(HttpServer(app, listener, self._limits, name="the control socket"))

    def close(self) -> None:
        """Accept no more connections, and remove the socket file. Harmless when repeated."""
        self._undo.close()

    def manage(self, membership: Membership) -> None:
        """Let callers add and remove the engines of the service, which are on ranks of their own."""
        self._calls.membership = membership

    def publish(self, metrics: dict[str, Any]) -> None:
        """Set the metrics that GET /metrics returns from now on."""
        self._calls.metrics = finite_or_null(metrics)


class Calls:
    """What the addresses of the control socket do."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.metrics: dict[str, Any] = {}
        self.membership: Membership | None = None
        self._operations = registry.operations

    def application(self, token: str | None, limits: Limits) -> Callable[..., Any]:
        """Return the ASGI application, whose callers must send the token if there is one."""
        api = make_api(token, limits)

        def name(incoming: Incoming) -> str:
            return check_name(incoming.path["name"])

        of_one = "/tenants/{name}"
        api.add("GET", "/metrics", lambda i: self.metrics)
        for action, kind in BODIES.items():
            call = partial(self._tokenize, action)
            api.add("POST", f"/tokenizer/{action}", call, kind)
        unknown = "/tokenizer/{action}"
        api.add("POST", unknown, lambda i: self._tokenize(i.path["action"], i), is_described=False)
        api.add("GET", "/tenants", lambda i: self._list())
        api.add("POST", "/tenants", lambda i: self._add(i.json()), NewTenant)
        api.add("GET", of_one, lambda i: self._shown(self.registry.get(name(i))))
        for method, path, call, kind in (
            ("DELETE", "", partial(self._move, "removed"), Change),
            ("POST", "/pause", self._pause, Pause),
            ("POST", "/resume", partial(self._move, "queued"), Change),
        ):
            changed = partial(_changed, call, name)
            api.add(method, of_one + path, changed, kind, needs_body=False)
        api.add(
            "POST",
            f"{of_one}/operations",
            lambda i: self._post(name(i), i.json()),
            *POSTED,
            most=limits.operation_bytes,
        )
        looked = f"{of_one}/operations/{{operation}}"
        api.add("GET", looked, lambda i: self._look(name(i), i.path["operation"]))
        add_engine_calls(api, self._engines)
        api.describe_at("/openapi.json")
        return api.asgi

    def _engines(self) -> Membership:
        if self.membership is None:
            raise Refused(409, NO_ENGINES)
        return self.membership

    def _tokenize(self, action: str, incoming: Incoming) -> dict[str, Any]:
        return self._tokenizer.answer(action, incoming.json())

    def _list(self) -> dict[str, Any]:
        return {"tenants": [self._shown(tenant) for tenant in self.registry.tenants()]}

    def _add(self, body: dict[str, Any]) -> Answer:
        new, request = read_new(body), ""
        if new.key is not None:
            request = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        tenant = self.registry.add(
            new.name,
            new.recipe,
            weight=new.weight,
            is_record=new.is_record,
            loop=new.loop,
            request=request,
        )
        return 201, self._shown(tenant)

    def _pause(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        reason = body.get("reason", REASON)
        if not isinstance(reason, str) or not reason.strip():
            raise Refused(400, 'expected no body, or {"reason": "a text"}')
        rest = {key: value for key, value in body.items() if key != "reason"}
        return self._move("paused", name, rest, reason)

    def _move(
        self, state: State, name: str, body: dict[str, Any], reason: str = ""
    ) -> dict[str, Any]:
        sequence = body.get("sequence")
        if set(body) - {"sequence"} or (sequence is not None and type(sequence) is not int):
            raise Refused(400, 'expected no body, or {"sequence": the number of the tenant}')
        return self._shown(self.registry.move(name, state, reason, sequence))

    def _post(self, name: str, body: dict[str, Any]) -> Answer:
        tenant = self._session(name)
        if tenant.state not in ("queued", "running"):
            why = f" ({tenant.reason})" if tenant.reason else ""
            raise Refused(409, f"session {name} is {tenant.state}{why}; it takes no operations")
        life, key = body.get("life"), body.get("key")
        for what, given in (("life", life), ("key", key)):
            if not isinstance(given, str | None):
                raise Refused(400, f"{what} is of type {type(given).__name__}")
        if key is not None and (life is None or not KEY.fullmatch(key)):
            raise Refused(400, "key is 1 to 64 letters, digits, _ and -, and comes with a life")
        own = {k: v for k, v in body.items() if k not in ("life", "key")}
        asked = read_body(own, self._bounds)
        return 201, {"id": self._operations.post(tenant.incarnation, asked, life, key)}

    def _look(self, name: str, operation: str) -> dict[str, Any]:
        return self._operations.look(self._session(name).name, operation)

    def _session(self, name: str) -> Tenant:
        tenant = self.registry.get(name)
        if tenant.loop != "client":
            raise Refused(409, f"tenant {name} has a recipe's loop, and takes no operations")
        return tenant

    @cached_property
    def _model(self) -> HfModel:
        model = self.registry.service.model
        return HfModel.read(model.path, model.architecture)

    @cached_property
    def _tokenizer(self) -> ServiceTokenizer:
        return ServiceTokenizer(self._model)

    @cached_property
    def _bounds(self) -> Bounds:
        context_len = self.registry.service.rollout.context_len or self._model.context_len
        return Bounds(self._model.sizes.vocab_size, context_len)

    def _shown(self, tenant: Tenant) -> dict[str, Any]:
        shown = describe(tenant)
        if tenant.loop == "client":
            shown["session"] = self._operations.show(tenant.incarnation)
        return shown


def make_api(token: str | None, limits: Limits) -> Api:
    """Return an API without addresses, whose callers are on this machine, are no web pages, and send
    the token if there is one."""

    def allow(headers: Headers, path: str) -> str:
        if not is_of_this_machine(headers.get("host"), headers.get("origin")):
            raise Refused(403, "not for web pages: leave Origin out and call localhost")
        if token is not None and not has_token(headers.get("authorization"), token):
            raise Refused(401, "expected the header Authorization: Bearer TOKEN")
        return ""

    rules = Rules(
        "The control socket of an mrl service",
        "docs/tenants.md",
        allow,
        security=None if token is None else BEARER,
        statuses=STATUSES,
        is_strict=True,
    )
    return Api(rules, limits)


def _changed(call: Callable[..., Any], name: Callable[[Incoming], str], incoming: Incoming) -> Any:
    return call(name(incoming), incoming.json())
