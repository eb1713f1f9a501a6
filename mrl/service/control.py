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
    GET    /metrics

Threads of rank 0 answer the requests. Before a request for a change is answered, the change is in
the registry and on disk. The loop of the service reads the change from the registry.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

from mrl.errors import DiskFailed, InputError
from mrl.run.json_lines import finite_or_null
from mrl.service.http import JsonServer, Limits, Refused, Request
from mrl.service.record import State, Tenant, check_name, describe
from mrl.service.registry import NoTenant, Registry, WrongState
from mrl.service.sessions.bodies import Bounds, read_body
from mrl.service.sessions.operations import NoOperation, OtherLife, TooMany
from mrl.service.sockets import SOCKET, open_tcp, open_unix, read_token
from mrl.service.tokenizer import ServiceTokenizer
from mrl.system.processes import Closing
from parallel.hf_config import HfModel

NEW_KEYS: dict[str, Any] = {
    "name": str,
    "recipe": dict,
    "weight": (int, float),
    "is_record": bool,
    "loop": str,
    "key": str,
}
"""The keys of the body of POST /tenants, with the types of their values."""
REASON = "a user paused it"
KEY = re.compile("[A-Za-z0-9_-]{1,64}")
"""The form of an idempotency key, by which a repeated request to post an operation or add a tenant
is recognized."""
STATUSES: dict[type[Exception], int] = {
    NoTenant: 404,
    NoOperation: 404,
    WrongState: 409,
    OtherLife: 409,
    TooMany: 429,
    DiskFailed: 507,
}
"""HTTP statuses by class of error; any other InputError has status 400."""
Answer = tuple[int, dict[str, Any]]


class Control(Closing):
    """The server of the control socket. It listens from its construction until `close()`. Raises
    InputError if it cannot listen."""

    def __init__(self, registry: Registry, limits: Limits | None = None) -> None:
        self.registry = registry
        self._metrics: dict[str, Any] = {}
        self._operations = registry.operations
        tcp = registry.service.control.tcp
        with ExitStack() as undo:
            self._server = undo.enter_context(JsonServer(self.answer, limits))
            self._server.listen(open_unix(registry.root))
            if tcp is not None:
                self._server.listen(open_tcp(tcp), read_token(registry.root))
            undo.pop_all()

    def close(self) -> None:
        """Accept no more connections, and remove the socket file. Harmless when repeated."""
        self._server.close()
        (self.registry.root / SOCKET).unlink(missing_ok=True)

    def publish(self, metrics: dict[str, Any]) -> None:
        """Set the metrics that GET /metrics returns from now on."""
        self._metrics = finite_or_null(metrics)

    def answer(self, request: Request) -> Answer:
        """Return the HTTP status and the JSON object that answer a request. Raises Refused."""
        try:
            return self._route(request)
        except (InputError, DiskFailed) as error:
            raise Refused(STATUSES.get(type(error), 400), str(error)) from None

    def _route(self, request: Request) -> Answer:
        known: dict[str, Callable[[dict[str, Any]], Answer]]
        match parts := request.path.split("/")[1:]:
            case ["metrics"]:
                known = {"GET": lambda _: (200, self._metrics)}
            case ["tokenizer", action]:
                known = {"POST": lambda body: (200, self._tokenizer.answer(action, body))}
            case ["tenants"]:
                known = {"GET": self._list, "POST": self._add}
            case ["tenants", name]:
                known = {
                    "GET": lambda _: (200, self._shown(self.registry.get(name))),
                    "DELETE": partial(self._move, name, "removed"),
                }
            case ["tenants", name, "pause"]:
                known = {"POST": partial(self._pause, name)}
            case ["tenants", name, "resume"]:
                known = {"POST": partial(self._move, name, "queued")}
            case ["tenants", name, "operations"]:
                known = {"POST": partial(self._post, name)}
            case ["tenants", name, "operations", operation]:
                known = {"GET": lambda _: self._look(name, operation)}
            case _:
                raise Refused(
                    404, f"there is no {request.path[:80]}; docs/tenants.md lists the addresses"
                )
        if parts[0] == "tenants" and len(parts) > 1:
            check_name(parts[1])
        if request.method not in known:
            raise Refused(405, f"expected {' or '.join(known)}, got {request.method}")
        if request.body is not None and request.method == "GET":
            raise Refused(400, "GET takes no body here")
        return known[request.method](request.body or {})

    def _list(self, _body: dict[str, Any]) -> Answer:
        return 200, {"tenants": [self._shown(tenant) for tenant in self.registry.tenants()]}

    def _add(self, body: dict[str, Any]) -> Answer:
        for key, value in body.items():
            if key not in NEW_KEYS:
                raise Refused(400, f"unknown key {key[:80]!r}; expected {', '.join(NEW_KEYS)}")
            # In Python, `True` is an int.
            if not isinstance(value, NEW_KEYS[key]) or isinstance(value, bool) != (
                NEW_KEYS[key] is bool
            ):
                raise Refused(400, f"{key} is of type {type(value).__name__}")
        if missing := [key for key in ("name", "recipe") if key not in body]:
            raise Refused(400, f"{missing[0]} is missing")
        weight = float(body.get("weight", 1.0))
        loop, is_record = body.get("loop", "recipe"), body.get("is_record", False)
        if loop not in ("recipe", "client") or (is_record and loop == "client"):
            raise Refused(
                400, 'loop is "recipe", or "client" for a session, which is no record of a run'
            )
        request = ""
        if (key := body.get("key")) is not None:
            if not KEY.fullmatch(key):
                raise Refused(400, "key is 1 to 64 letters, digits, _ and -")
            request = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        tenant = self.registry.add(
            body["name"],
            body["recipe"],
            weight=weight,
            is_record=is_record,
            loop=loop,
            request=request,
        )
        return 201, self._shown(tenant)

    def _pause(self, name: str, body: dict[str, Any]) -> Answer:
        reason = body.get("reason", REASON)
        if not isinstance(reason, str) or not reason.strip():
            raise Refused(400, 'expected no body, or {"reason": "a text"}')
        rest = {key: value for key, value in body.items() if key != "reason"}
        return self._move(name, "paused", rest, reason)

    def _move(self, name: str, state: State, body: dict[str, Any], reason: str = "") -> Answer:
        sequence = body.get("sequence")
        if set(body) - {"sequence"} or (sequence is not None and type(sequence) is not int):
            raise Refused(400, 'expected no body, or {"sequence": the number of the tenant}')
        return 200, self._shown(self.registry.move(name, state, reason, sequence))

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

    def _look(self, name: str, operation: str) -> Answer:
        return 200, self._operations.look(self._session(name).name, operation)

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
