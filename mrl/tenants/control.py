"""The control socket of a service: users add tenants, pause, resume, remove and look at them.

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

It answers from threads of rank 0. A change is in the registry, on disk, before the answer; the loop of
the service takes it from `changes` when it comes to it.
"""

from __future__ import annotations

import hashlib
import json
import queue
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, NamedTuple

from mrl.errors import DiskFailed, InputError
from mrl.run.json_lines import finite_or_null
from mrl.system.processes import Closing
from mrl.tenants.http import JsonServer, Limits, Refused, Request
from mrl.tenants.record import State, Tenant, check_name, describe
from mrl.tenants.registry import NoTenant, Registry, WrongState
from mrl.tenants.sessions.bodies import Bounds, read_body
from mrl.tenants.sessions.operations import NoOperation, OtherLife, TooMany
from mrl.tenants.sockets import SOCKET, open_tcp, open_unix, read_token
from mrl.tenants.tokenizer import ServiceTokenizer
from parallel.hf_config import HfModel

NEW_KEYS: dict[str, Any] = {
    "name": str,
    "recipe": dict,
    "weight": (int, float),
    "is_record": bool,
    "loop": str,
    "key": str,
}
"""The keys of the body of POST /tenants, with their types."""
REASON = "a user paused it"
KEY = re.compile("[A-Za-z0-9_-]{1,64}")
"""The form of a key, which identifies an operation or a new tenant if the request is repeated."""
Answer = tuple[int, dict[str, Any]]


class Change(NamedTuple):
    """A `Change` says which tenant a user has changed. Of several ones of a tenant the registry has the
    last: the loop looks there."""

    name: str
    state: State


class Control(Closing):
    """Listens from the start until `close()`. Raises InputError where it cannot."""

    def __init__(self, registry: Registry, limits: Limits | None = None) -> None:
        self.registry = registry
        self.changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
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
        """Accept nobody any more, and remove the socket. Harmless when repeated."""
        self._server.close()
        (self.registry.root / SOCKET).unlink(missing_ok=True)

    def publish(self, metrics: dict[str, Any]) -> None:
        """Give GET /metrics what it answers from now on."""
        self._metrics = finite_or_null(metrics)

    def answer(self, request: Request) -> Answer:
        """Return status and message for a request. Raises Refused."""
        try:
            return self._route(request)
        except (NoTenant, NoOperation) as error:
            raise Refused(404, str(error)) from None
        except (WrongState, OtherLife) as error:
            raise Refused(409, str(error)) from None
        except TooMany as error:
            raise Refused(429, str(error)) from None
        except InputError as error:
            raise Refused(400, str(error)) from None
        except DiskFailed as error:
            return 507, {"error": str(error)}

    def _route(self, request: Request) -> Answer:
        match request.path.split("/")[1:]:
            case ["metrics"]:
                return _method(request, {"GET": self._get_metrics})
            case ["tokenizer", action]:
                answer = lambda body: (200, self._tokenizer.answer(action, body))  # noqa: E731
                return _method(request, {"POST": answer}, body="POST")
            case ["tenants"]:
                return _method(request, {"GET": self._list, "POST": self._add}, body="POST")
            case ["tenants", name]:
                check_name(name)
                return _method(
                    request,
                    {
                        "GET": lambda _: (200, self._shown(self.registry.get(name))),
                        "DELETE": partial(self._move, name, "removed"),
                    },
                    body="DELETE",
                )
            case ["tenants", name, "pause"]:
                check_name(name)
                return _method(request, {"POST": partial(self._pause, name)}, body="POST")
            case ["tenants", name, "resume"]:
                check_name(name)
                return _method(request, {"POST": partial(self._move, name, "queued")}, body="POST")
            case ["tenants", name, "operations"]:
                check_name(name)
                return _method(request, {"POST": partial(self._post, name)}, body="POST")
            case ["tenants", name, "operations", operation]:
                check_name(name)
                return _method(request, {"GET": lambda _: self._look(name, operation)})
        raise Refused(404, f"there is no {request.path[:80]}; docs/tenants.md lists the addresses")

    def _get_metrics(self, _body: dict[str, Any]) -> Answer:
        return 200, self._metrics

    def _list(self, _body: dict[str, Any]) -> Answer:
        return 200, {"tenants": [self._shown(tenant) for tenant in self.registry.tenants()]}

    def _add(self, body: dict[str, Any]) -> Answer:
        for key, value in body.items():
            if key not in NEW_KEYS:
                raise Refused(400, f"unknown key {key[:80]!r}; expected {', '.join(NEW_KEYS)}")
            # `true` is a number in Python.
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
        return 201, self._changed(tenant)

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
        return 200, self._changed(self.registry.move(name, state, reason, sequence))

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

    def _changed(self, tenant: Tenant) -> dict[str, Any]:
        self.changes.put(Change(tenant.name, tenant.state))
        return self._shown(tenant)

    def _shown(self, tenant: Tenant) -> dict[str, Any]:
        shown = describe(tenant)
        if tenant.loop == "client":
            shown["session"] = self._operations.show(tenant.incarnation)
        return shown


def _method(
    request: Request, known: dict[str, Callable[[dict[str, Any]], Answer]], body: str = ""
) -> Answer:
    """Call what is `known` for the request's method; only that of `body` may have one."""
    if request.method not in known:
        raise Refused(405, f"expected {' or '.join(known)}, got {request.method}")
    if request.body is not None and request.method != body:
        raise Refused(400, f"{request.method} takes no body here")
    return known[request.method](request.body or {})
