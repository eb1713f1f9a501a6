"""The addresses of the API, as an ASGI application.

A request reaches its function only if it comes from this machine but not from a web page, has a valid
key, and is not too large. The function then runs in a thread.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from mrl.errors import DiskFailed, InputError
from mrl.service.callers import Limits, Refused
from mrl.system.http_callers import is_of_this_machine
from mrl.tinker import bodies
from mrl.tinker.calls import Calls
from mrl.tinker.data import BadDatum
from mrl.tinker.futures import as_json
from mrl.tinker.incoming import Incoming, read_content
from mrl.tinker.openapi import Address, describe
from mrl.tinker.passes import ask_pass
from mrl.tinker.wire import WireError
from mrl.version import __version__

T = TypeVar("T")
API = "/api/v1"
PROTO = "application/x-protobuf"
HOLD_S = 20.0
"""How long a request for a result waits, in seconds. If there is no result by then, the answer asks the
client to try again."""
FIRST_LOOK_S, LAST_LOOK_S = 0.005, 0.25
INLINE_BYTES = 1 << 20
"""A result with more bytes is sent in a second request, if the client supports that."""
MAX_ERROR_CHARS = 2000


class App:
    """Answers requests; `asgi` is the application."""

    def __init__(self, calls: Calls, limits: Limits) -> None:
        self._calls, self._limits = calls, limits
        self.addresses: list[Address] = []
        """The addresses that need a key."""
        models, training = calls.models, calls.training
        samplers, checkpoints = calls.samplers, calls.checkpoints
        posts: dict[str, tuple[type[BaseModel], Callable[[str, Any], Any]]] = {
            "create_session": (bodies.CreateSession, models.create_session),
            "session_heartbeat": (bodies.Heartbeat, models.heartbeat),
            "create_model": (bodies.CreateModel, models.create),
            "unload_model": (bodies.ModelId, models.unload),
            "get_info": (bodies.ModelId, models.info),
            "optim_step": (bodies.OptimStep, training.optim_step),
            "save_weights": (bodies.SaveWeights, training.save),
            "save_weights_for_sampler": (bodies.SaveForSampler, training.save_for_sampler),
            "save_weights_external": (bodies.SaveExternal, training.save_external),
            "load_weights": (bodies.LoadWeights, calls.load),
            "create_sampling_session": (bodies.CreateSampler, samplers.create),
            "join_sampling_session": (bodies.JoinSampler, samplers.join),
            "asample": (bodies.Sample, samplers.sample),
            "weights_info": (bodies.WeightsInfo, checkpoints.weights_info),
            "cancel_future": (bodies.Cancel, lambda o, b: calls.futures.cancel(o, b.request_id)),
        }
        routes = [self._post(name, kind, call) for name, (kind, call) in posts.items()]
        run = "/training_runs/{run}"
        saved = f"{run}/checkpoints/{{segment}}/{{name}}"
        routes += [
            self._route("POST", "/client/config", lambda i: calls.client_config()),
            self._route("POST", "/client/dynamic_config", lambda i: calls.dynamic_config()),
            self._route("POST", "/telemetry", lambda i: {"status": "accepted"}),
            self._route(
                "POST",
                "/forward_backward",
                partial(self._pass, forward_only=False),
                bodies.JsonPass,
            ),
            self._route(
                "POST", "/forward", partial(self._pass, forward_only=True), bodies.JsonPass
            ),
            self._route("POST", "/sessions/{session}/finish", calls.finish, bodies.Finish),
            self._route("GET", "/get_server_capabilities", lambda i: calls.capabilities()),
            self._route("GET", "/sessions", calls.sessions),
            self._route("GET", "/sessions/{session}", calls.session),
            self._route(
                "GET", "/samplers/{sampler}", lambda i: samplers.info(i.owner, i.path["sampler"])
            ),
            self._route("GET", "/training_runs", calls.training_runs),
            self._route("GET", run, calls.training_run),
            self._route("GET", f"{run}/checkpoints", calls.checkpoints_of_run),
            self._route("GET", "/checkpoints", calls.checkpoints_of_user),
            self._route("DELETE", saved, calls.delete_checkpoint),
            self._route("PUT", f"{saved}/ttl", calls.set_ttl, bodies.Ttl),
            self._route("GET", f"{saved}/external_weights_urls", calls.file_urls),
            Route(f"{API}/retrieve_future", self._guarded(self._retrieve), methods=["POST"]),
            Route(f"{API}/healthz", _healthy, methods=["GET"]),
            Route(f"{API}/openapi.json", self._described, methods=["GET"]),
            Route(f"{API}/files/{{mark}}/{{name}}", self._file, methods=["GET"]),
        ]
        errors: dict[Any, Any] = {404: _nowhere, 405: _nowhere}
        self.asgi = Starlette(routes=routes, exception_handlers=errors)

    def _post(self, name: str, kind: type[BaseModel], call: Callable[[str, Any], Any]) -> Route:
        return self._route(
            "POST", f"/{name}", lambda i: call(i.owner, bodies.read(kind, i.json())), kind
        )

    def _route(
        self,
        method: str,
        path: str,
        call: Callable[[Incoming], Any],
        body: type[BaseModel] | None = None,
    ) -> Route:
        """Return the route of an address, whose function runs in a thread. `body`: what it reads."""
        self.addresses.append(Address(method, API + path, body))

        async def answer(incoming: Incoming) -> Response:
            found = await run_in_threadpool(call, incoming)
            return _json(200, {} if found is None else found)

        return Route(API + path, self._guarded(answer), methods=[method])

    def _guarded(
        self, answer: Callable[[Incoming], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that reads an allowed request, and turns errors into answers."""

        async def endpoint(request: Request) -> Response:
            try:
                return await answer(await self._read(request))
            except Exception as error:
                return _refused(error)

        return endpoint

    async def _read(self, request: Request) -> Incoming:
        headers, limits = request.headers, self._limits
        if not is_of_this_machine(headers.get("host"), headers.get("origin")):
            raise Refused(403, "not for web pages: leave Origin out and call localhost")
        owner = await run_in_threadpool(self._calls.keys.owner, headers.get("x-api-key"))
        if owner is None:
            raise Refused(
                401, "expected the header X-API-Key with a key of `mrl tenants key add NAME`"
            )
        most = limits.operation_bytes if request.method == "POST" else limits.body_bytes
        content = await read_content(request, most, limits.request_s)
        return Incoming(
            owner,
            content,
            dict(request.path_params),
            dict(request.query_params),
            headers.get("content-type", ""),
            headers.get("accept", ""),
            limits.depth,
        )

    def _pass(self, incoming: Incoming, *, forward_only: bool) -> Any:
        given = incoming.content if PROTO in incoming.content_type else incoming.json()
        return ask_pass(self._calls.training, incoming.owner, given, forward_only=forward_only)

    async def _retrieve(self, incoming: Incoming) -> Response:
        """Return the result of a request, for which the client waits."""
        body = bodies.read(bodies.Retrieve, incoming.json())
        end, pause_s = time.monotonic() + HOLD_S, FIRST_LOOK_S
        futures = self._calls.futures
        row = await run_in_threadpool(futures.request, incoming.owner, body.request_id)
        while True:
            found = await run_in_threadpool(futures.find, row)
            if found is not None:
                break
            if time.monotonic() >= end or self._calls.is_closing:
                again = {
                    "type": "try_again",
                    "request_id": body.request_id,
                    "queue_state": "active",
                }
                return _json(408, again)
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_LOOK_S)
        is_proto = found.proto is not None and PROTO in incoming.accept
        payload = found.proto if is_proto else await run_in_threadpool(as_json, found.json)
        assert payload is not None
        if body.allow_metadata_only and len(payload) > INLINE_BYTES:
            size = {"status": "complete_metadata", "response_payload_size": len(payload)}
            return _json(200, size)
        return Response(payload, media_type=PROTO if is_proto else "application/json")

    async def _described(self, _request: Request) -> Response:
        retrieve = Address("POST", f"{API}/retrieve_future", bodies.Retrieve)
        return _json(200, describe([*self.addresses, retrieve], __version__))

    async def _file(self, request: Request) -> Response:
        """Return a file of an exported checkpoint. Only its owner has received the
        signature in its address."""
        try:
            if not is_of_this_machine(request.headers.get("host"), request.headers.get("origin")):
                raise Refused(403, "not for web pages")
            mark, name = request.path_params["mark"], request.path_params["name"]
            return FileResponse(await run_in_threadpool(self._calls.file, mark, name))
        except Exception as error:
            return _refused(error)


async def _healthy(_request: Request) -> Response:
    return _json(200, {"status": "ok"})


async def _nowhere(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.url.path[:200]}"
    return _json(status, {"detail": f"there is no {what} here; docs/tinker.md lists the addresses"})


def _refused(error: Exception) -> Response:
    """Return the answer to a request that raised an error."""
    match error:
        case Refused():
            return _json(error.status, {"detail": _line(error)})
        case WireError() | BadDatum():
            return _json(400, {"detail": _line(error)})
        case DiskFailed():
            return _json(507, {"detail": _line(error)})
        case InputError():
            return _json(400, {"detail": _line(error)})
    traceback.print_exception(error)
    name = type(error).__name__
    return _json(500, {"detail": f"{name}, which mrl does not foresee; see its log"})


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_ERROR_CHARS]


def _json(status: int, answer: Any) -> Response:
    return Response(as_json(answer), status, media_type="application/json")
