"""The addresses of the endpoint, as an ASGI application.

A request reaches its function only if it comes from this machine but not from a web page, and has the
key of a running episode. The function runs in a thread, because it waits for the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from mrl.collect.endpoint import answers, bodies
from mrl.collect.endpoint.messages import read_messages
from mrl.collect.endpoint.record import EpisodeRecord
from mrl.collect.endpoint.refused import Refused
from mrl.collect.endpoint.texts import as_text
from mrl.collect.endpoint.turns import Answer, Caller
from mrl.system.json_text import unpaired_surrogate
from mrl.web.callers import is_of_this_machine
from mrl.web.connection import one_line

MAX_BODY_BYTES = 32 << 20
MAX_THREADS = 512
"""Requests that wait for the engine at a time; further ones wait for one of these."""
LOOK_S = 0.5
"""Seconds between two checks that the caller is still there."""
Call = Callable[[EpisodeRecord, dict[str, Any], Caller], Response]


class App:
    """Answers requests; `asgi` is the application."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="mrl-endpoint")
        self._episodes: dict[bytes, EpisodeRecord] = {}
        """The episode of each key, by the key's SHA-256."""
        self._lock = threading.Lock()
        calls: dict[str, Call] = {
            "/v1/chat/completions": _chat,
            "/v1/chat/completions/tokens": _chat_of_tokens,
            "/v1/completions": _complete,
            "/inference/v1/generate": _generate,
            "/tokenize": _tokenize,
        }
        routes = [Route(path, self._post(call), methods=["POST"]) for path, call in calls.items()]
        routes += [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._models, methods=["GET"]),
        ]
        errors: dict[Any, Any] = {404: _nowhere, 405: _nowhere}
        self.asgi = Starlette(routes=routes, exception_handlers=errors)
        self.asgi.router.redirect_slashes = False

    def add(self, key: str, episode: EpisodeRecord) -> None:
        """Answer requests with this key for an episode."""
        with self._lock:
            self._episodes[_digest(key)] = episode

    def remove(self, key: str) -> None:
        """Refuse requests with this key."""
        with self._lock:
            self._episodes.pop(_digest(key), None)

    def close(self) -> None:
        """End the threads, once the requests are answered."""
        self._threads.shutdown(cancel_futures=True)

    def _episode(self, request: Request) -> EpisodeRecord:
        headers = request.headers
        if not is_of_this_machine(headers.get("host"), headers.get("origin")):
            raise Refused(403, "not for web pages: leave Origin out and call 127.0.0.1")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        with self._lock:
            episode = self._episodes.get(_digest(key.strip()))
        if scheme.lower() != "bearer" or episode is None:
            raise Refused(
                401,
                "no running episode has this key; send the episode's OPENAI_API_KEY as Authorization: "
                "Bearer KEY",
                "invalid_api_key",
            )
        return episode

    def _post(self, call: Call) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                episode = self._episode(request)
                request.state.connection.let_in()
                body = _parsed(await _content(request))
                return await self._run(request, call, episode, body)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return _refusal(error)

        return endpoint

    async def _run(
        self,
        request: Request,
        call: Call,
        episode: EpisodeRecord,
        body: dict[str, Any],
    ) -> Response:
        """Run `call` in a thread. If the caller goes away meanwhile, abort what it asked for; if it
        goes away before the response is sent, forget the answers."""
        caller, loop = Caller(), asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, call, episode, body, caller)
        while True:
            done, _ = await asyncio.wait([future], timeout=LOOK_S)
            if caller.is_gone or await request.is_disconnected():
                await asyncio.to_thread(episode.drop, caller)
            if done:
                return _Dropping(future.result(), episode, caller)

    async def _models(self, request: Request) -> Response:
        try:
            episode = self._episode(request)
        except Refused as error:
            return _refusal(error)
        request.state.connection.let_in()
        card = {
            "id": request.path_params.get("name", answers.MODEL),
            "object": "model",
            "created": 0,
            "owned_by": "mrl",
            "max_model_len": episode.context_len,
        }
        is_one = "name" in request.path_params
        return JSONResponse(card if is_one else {"object": "list", "data": [card]})


def _chat(episode: EpisodeRecord, body: dict[str, Any], caller: Caller) -> Response:
    if body.get("tokens") is not None:
        raise Refused(400, "tokens is not supported here; post them to /v1/chat/completions/tokens")
    ask = bodies.read_chat(body, episode.sampling)
    found = episode.answer([episode.chat(ask.messages, ask.tools)], ask.asked, caller)
    return _chat_response(episode, found, ask.wanted)


def _chat_of_tokens(episode: EpisodeRecord, body: dict[str, Any], caller: Caller) -> Response:
    ask = bodies.read_chat(body, episode.sampling)
    if ask.tokens is None:
        raise Refused(400, "tokens is missing, expected the token ids of the whole prompt")
    context = episode.tokens(ask.tokens, ask.messages, ask.tools)
    return _chat_response(episode, episode.answer([context], ask.asked, caller), ask.wanted)


def _chat_response(episode: EpisodeRecord, found: list[Answer], wanted: bodies.Wanted) -> Response:
    response = answers.chat_response(found, wanted, episode.texts)
    if wanted.streams:
        return _stream(answers.chat_events(response, wanted))
    return JSONResponse(response)


def _complete(episode: EpisodeRecord, body: dict[str, Any], caller: Caller) -> Response:
    ask = bodies.read_completion(body, episode.sampling)
    contexts = [
        episode.text(prompt) if isinstance(prompt, str) else episode.tokens(prompt)
        for prompt in ask.prompts
    ]
    found = episode.answer(contexts, ask.asked, caller)
    response = answers.text_response(found, ask.wanted, episode.texts)
    if ask.wanted.streams:
        return _stream(answers.text_events(response, ask.wanted))
    return JSONResponse(response)


def _generate(episode: EpisodeRecord, body: dict[str, Any], caller: Caller) -> Response:
    ask = bodies.read_generate(body, episode.sampling)
    assert ask.tokens is not None
    found = episode.answer([episode.tokens(ask.tokens)], ask.asked, caller)
    return JSONResponse(answers.generate_response(found, episode.texts))


def _tokenize(episode: EpisodeRecord, body: dict[str, Any], caller: Caller) -> Response:
    """Return the token ids of messages or of a text, without asking the policy."""
    prompt, asks = body.get("prompt"), body.get("add_generation_prompt")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise Refused(400, f"prompt is {prompt!r:.200}, expected a text; or send messages")
        ids = episode.texts.encode(prompt)
    elif not isinstance(asks, bool | None):
        raise Refused(400, f"add_generation_prompt is {asks!r:.200}, expected true or false")
    else:
        messages, tools = read_messages(body.get("messages")), as_text(body.get("tools"))
        ids = episode.texts.beginning(messages, tools, asks=asks is not False)
    return JSONResponse(
        {
            "count": len(ids),
            "max_model_len": episode.context_len,
            "tokens": ids,
            "token_strs": None,
        }
    )


class _Dropping(Response):
    """A response whose answers are forgotten if the caller goes away before the response is sent. A
    stream is sent with its last event: clients close the connection once they have read that."""

    def __init__(self, response: Response, episode: EpisodeRecord, caller: Caller) -> None:
        self._response, self._episode, self._caller = response, episode, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle, is_sent = scope["state"]["connection"].cycle, False

        async def sending(message: Message) -> None:
            nonlocal is_sent
            await send(message)  # nothing is sent, and nothing raised, if the caller has gone away
            if message["type"] == "http.response.body" and not cycle.disconnected:
                is_last = not message.get("more_body") or message["body"] == answers.DONE
                is_sent = is_sent or is_last

        try:
            await self._response(scope, receive, sending)
        finally:
            if not is_sent:
                await asyncio.to_thread(self._episode.drop, self._caller)


def _stream(events: Iterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


async def _content(request: Request) -> bytes:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise Refused(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
        half = unpaired_surrogate(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, f"the body is a {type(body).__name__}, expected a JSON object")
    if half:
        raise Refused(400, f"the body has {half}, half of a surrogate pair and not a character")
    return body


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


async def _nowhere(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.url.path[:200]}"
    return _error(status, f"there is no {what} here; docs/endpoint.md lists the addresses", None)


def _refusal(error: Exception) -> Response:
    """Return the answer to a request that raised an error."""
    if isinstance(error, Refused):
        return _error(error.status, str(error), error.code)
    traceback.print_exception(error)
    return _error(500, f"{type(error).__name__}, which mrl does not foresee; see its log", None)


def _error(status: int, why: str, code: str | None) -> Response:
    return JSONResponse(as_error(status, why, code), status)


def as_error(status: int, why: str, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form. `code` is OpenAI's name of the reason, if it has one."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": one_line(why), "type": kind, "param": None, "code": code}}
