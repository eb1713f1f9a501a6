"""The addresses of the API, as an ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response

from mrl.errors import DiskFailed, InputError
from mrl.tinker import bodies
from mrl.tinker.calls import Calls
from mrl.tinker.data import BadDatum
from mrl.tinker.futures import as_json
from mrl.tinker.passes import ask_pass
from mrl.tinker.wire import WireError
from mrl.web.app import Api, Call, Incoming, Rules
from mrl.web.callers import is_of_this_machine
from mrl.web.limits import Limits, Refused

API = "/api/v1"
PROTO = "application/x-protobuf"
HOLD_S = 20.0
"""How long a request for a result waits, in seconds. If there is no result by then, the answer asks the
client to try again."""
FIRST_LOOK_S, LAST_LOOK_S = 0.005, 0.25
INLINE_BYTES = 1 << 20
"""A result with more bytes is sent in a second request, if the client supports that."""
LIMITS = Limits(answer_s=60.0, request_s=60.0, unread=128, connections=1024, threads=40)
"""The SDK keeps a request open for each result for which it waits. These hold no thread."""
OPEN = (f"{API}/healthz", f"{API}/openapi.json")
FILES = f"{API}/files/"
"""Only its owner has received the signature in the address of a file."""
PAGE = ("limit", "offset")


class App:
    """Answers requests; `asgi` is the application."""

    def __init__(self, calls: Calls, limits: Limits = LIMITS) -> None:
        self._calls = calls
        rules = Rules(
            "The Tinker API of mrl",
            "docs/tinker.md",
            self._allow,
            security={"type": "apiKey", "in": "header", "name": "X-API-Key"},
            error_key="detail",
            statuses={WireError: 400, BadDatum: 400, DiskFailed: 507, InputError: 400},
            encodings=("zstd",),
        )
        self._api = api = Api(rules, limits, as_json)
        self._most = limits.operation_bytes
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
        for name, (kind, call) in posts.items():
            self._post(f"/{name}", partial(_posted, kind, call), kind)
        run = "/training_runs/{run}"
        saved = f"{run}/checkpoints/{{segment}}/{{name}}"
        self._post("/client/config", lambda i: calls.client_config())
        self._post("/client/dynamic_config", lambda i: calls.dynamic_config())
        self._post("/telemetry", lambda i: {"status": "accepted"})
        for name in ("forward_backward", "forward"):
            call = partial(self._pass, forward_only=name == "forward")
            self._post(f"/{name}", call, bodies.JsonPass)
        self._post("/sessions/{session}/finish", calls.finish, bodies.Finish)
        self._post("/retrieve_future", self._retrieve, bodies.Retrieve)
        self._get("/get_server_capabilities", lambda i: calls.capabilities())
        self._get("/sessions", calls.sessions, PAGE)
        self._get("/sessions/{session}", calls.session)
        self._get("/samplers/{sampler}", lambda i: samplers.info(i.owner, i.path["sampler"]))
        self._get("/training_runs", calls.training_runs, PAGE)
        self._get(run, calls.training_run)
        self._get(f"{run}/checkpoints", calls.checkpoints_of_run)
        self._get("/checkpoints", calls.checkpoints_of_user, PAGE)
        self._get(f"{saved}/external_weights_urls", calls.file_urls)
        api.add("DELETE", API + saved, calls.delete_checkpoint)
        api.add("PUT", f"{API}{saved}/ttl", calls.set_ttl, bodies.Ttl)
        api.add("GET", OPEN[0], lambda i: {"status": "ok"}, is_described=False)
        api.add("GET", FILES + "{mark}/{name}", self._file, is_described=False)
        api.describe_at(OPEN[1])
        self.asgi = api.asgi

    def _post(self, path: str, call: Call, *kinds: type[BaseModel]) -> None:
        self._api.add("POST", API + path, call, *kinds, most=self._most)

    def _get(self, path: str, call: Call, query: tuple[str, ...] = ()) -> None:
        self._api.add("GET", API + path, call, query=query)

    def _allow(self, headers: Headers, path: str) -> str | None:
        """Return the owner of the key; None for an address that needs no key. Raises Refused."""
        if not is_of_this_machine(headers.get("host"), headers.get("origin")):
            raise Refused(403, "not for web pages: leave Origin out and call localhost")
        if path in OPEN or path.startswith(FILES):
            return None
        given = headers.get("x-api-key")
        owner = self._calls.keys.owner(given)
        if owner is None:
            problem = "the key in X-API-Key is none of this service" if given else "no X-API-Key"
            raise Refused(401, f"{problem}; make one: mrl tenants key add NAME --service FOLDER")
        return owner

    def _pass(self, incoming: Incoming, *, forward_only: bool) -> Any:
        is_message = PROTO in incoming.headers.get("content-type", "")
        given = incoming.content if is_message else incoming.json()
        return ask_pass(self._calls.training, incoming.owner, given, forward_only=forward_only)

    async def _retrieve(self, incoming: Incoming) -> Any:
        """Return the result of a request, for which the client waits."""
        body = bodies.read(bodies.Retrieve, incoming.json())
        end, pause_s = time.monotonic() + HOLD_S, FIRST_LOOK_S
        futures, in_thread = self._calls.futures, self._api.in_thread
        row = await in_thread(partial(futures.request, incoming.owner, body.request_id))
        while True:
            found = await in_thread(partial(futures.find, row))
            if found is not None:
                break
            if time.monotonic() >= end or self._calls.is_closing:
                again = {
                    "type": "try_again",
                    "request_id": body.request_id,
                    "queue_state": "active",
                }
                return 408, again
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_LOOK_S)
        is_proto = found.proto is not None and PROTO in incoming.headers.get("accept", "")
        payload = found.proto if is_proto else await in_thread(partial(as_json, found.json))
        assert payload is not None
        if body.allow_metadata_only and len(payload) > INLINE_BYTES:
            return {"status": "complete_metadata", "response_payload_size": len(payload)}
        return Response(payload, media_type=PROTO if is_proto else "application/json")

    def _file(self, incoming: Incoming) -> Response:
        """Return a file of an exported checkpoint."""
        return FileResponse(self._calls.file(incoming.path["mark"], incoming.path["name"]))


def _posted(kind: type[BaseModel], call: Callable[[str, Any], Any], incoming: Incoming) -> Any:
    return call(incoming.owner, bodies.read(kind, incoming.json()))
