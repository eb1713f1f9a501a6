"""An endpoint's open calls of generate(), and the weight versions in the prefix cache.

A call may run *alone*: from its first request to its last answer the endpoint has no other open call.
Concurrent calls come from several threads, and the weights may change while they are open.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from mrl.config import RolloutConfig
from mrl.engines.base import Completion, EngineLost, Request
from mrl.engines.sglang.body import version_key
from mrl.engines.sglang.connection import REAP_S, ServerConnection
from mrl.engines.sglang.decode import Expected, RouteShape, decode_completion, was_retracted
from mrl.engines.sglang.prefixes import KnownPrefixes
from mrl.engines.sglang.request_sender import Answer, Enqueue, RequestSender, SendContext
from mrl.engines.sglang.route_memory import RouteReader
from mrl.errors import RunFailed

POLL_S = 0.2
"""Seconds between two checks of the server while a call waits for the weights."""


@dataclass(eq=False)
class OpenCall:
    """A call of generate() between its first request and its last answer."""

    is_alone: bool
    is_keyed: bool
    """Whether its requests carry a cache key (`body.version_key`), and so read from the prefix cache
    only what their own weights computed."""
    cache: str
    """Suffix of the cache key. Calls with different suffixes do not share cached prefixes."""
    versions: list[int]
    """The weight versions in force since the call began, the oldest first."""
    in_cache: tuple[int, ...]
    """The weight versions that computed cached prefixes of requests without a cache key, before the
    call began. The oldest version comes first."""
    retracted: bool = False
    sender: RequestSender = field(init=False)


class InFlightRequests:
    """The open calls of an endpoint. Every method may be called from any thread."""

    def __init__(
        self,
        connection: ServerConnection,
        routes: RouteReader,
        shape: RouteShape | None,
        config: RolloutConfig,
        adapter_of: Callable[[int], str | None] | None = None,
        *,
        shares_server: bool = False,
        enqueue: Enqueue | None = None,
    ) -> None:
        """`shape` is None if routes are off. Only the time limits of `config` are used.
        `shares_server`: the server has other endpoints. With `enqueue`, requests wait at a gate.

        `adapter_of` is given if updates load an adapter, and returns SGLang's name of a version. A
        request then keeps the version under which it was sent, even if a newer version is loaded.
        """
        self._connection = connection
        self._routes = routes
        self._shape = shape
        self._config = config
        self._adapter_of = adapter_of
        self._shares_server = shares_server
        self._enqueue = enqueue
        self._open: list[OpenCall] = []
        self._changed = threading.Condition()
        self._known = KnownPrefixes()
        self._in_cache: list[int] = []
        """The weight versions that may have computed cached prefixes of requests without a cache
        key (`version_key`). The oldest version comes first."""
        self._in_keyed_cache: set[int] = set()
        self.is_paused = False
        self.is_held = False
        """Whether new calls wait because the weights change or log-probs of sequences are computed."""

    @property
    def any_open(self) -> bool:
        """Whether a call of generate() is open."""
        return bool(self._open)

    @property
    def is_cache_empty(self) -> bool:
        """Whether no request has written to the prefix cache since the cache was last dropped."""
        return not (self._in_cache or self._in_keyed_cache)

    def versions_in_use(self) -> set[int]:
        """Return the versions that requests in flight use or, while they are being sent, may use."""
        found: set[int] = set()
        with self._changed:
            for opened in self._open:
                for num_updates in opened.sender.pending_since():
                    since = (
                        slice(None) if num_updates is None else slice(num_updates, num_updates + 1)
                    )
                    found.update(opened.versions[since])
        return found

    def fill_cache(self, version: int) -> None:
        """Record that requests without a cache key will cache prefixes that `version` computes."""
        with self._changed:
            if version not in self._in_cache:
                self._in_cache.append(version)

    def forget_cache(self) -> None:
        """Record that the prefix cache was dropped."""
        with self._changed:
            self._in_cache, self._in_keyed_cache = [], set()
            self._known.keep(())

    def begin(
        self,
        requests: Sequence[Request],
        check_ready: Callable[[], int],
        *,
        is_alone: bool,
        is_keyed: bool,
        cache: str = "",
    ) -> OpenCall:
        """Open a call. A call that is not alone waits while the engine is paused or its weights change.

        `is_alone`, `is_keyed` and `cache` become fields of the `OpenCall`. `check_ready` returns the
        weight version, or raises RuntimeError if the state of the engine does not allow a call.
        Raises RuntimeError if calls are open and this call or one of them must run alone, ValueError
        for a request id that is in flight already, RunFailed after waiting for
        `rollout.request_timeout_s`.
        """
        deadline = time.monotonic() + self._config.request_timeout_s
        with self._changed:
            while not is_alone and (self.is_paused or self.is_held):
                self._changed.wait(POLL_S)
                self._connection.check_alive()
                if time.monotonic() > deadline:
                    raise RunFailed(
                        "generate: the engine was not resumed within rollout.request_timeout_s="
                        f"{self._config.request_timeout_s:g} s"
                    )
            version = check_ready()
            if self._open and (is_alone or any(other.is_alone for other in self._open)):
                raise RuntimeError(
                    f"generate: {len(self._open)} call(s) of generate() are open, and "
                    f"{'this one' if is_alone else 'one of them'} was to run alone; finish or leave "
                    "what is open first, or give concurrent=True to all of them"
                )
            self._refuse_known_ids(requests)
            self._routes.open_call()
            if not is_keyed:
                self.fill_cache(version)
            opened = OpenCall(is_alone, is_keyed, cache, [version], tuple(self._in_cache))
            opened.sender = RequestSender(
                self._connection,
                requests,
                return_routes=self._shape is not None,
                request_timeout_s=self._config.request_timeout_s,
                stall_timeout_s=self._config.stall_timeout_s,
                on_send=partial(self._context_of, opened),
                is_alone=is_alone and not self._shares_server,
                enqueue=self._enqueue,
            )
            self._open.append(opened)
            return opened

    def _refuse_known_ids(self, requests: Sequence[Request]) -> None:
        ids = {request.request_id for request in requests}
        for other in self._open:
            if known := ids & other.sender.request_ids:
                raise ValueError(
                    f"{min(known)}: a request with this id is in flight already, expected another id"
                )

    def completions(self, opened: OpenCall) -> Iterator[Completion]:
        """Send the requests of a call, and yield completions as `PolicyEndpoint.generate` does."""
        for answer in opened.sender.answers():
            expected = self._expected(opened, answer.num_updates)
            try:
                completion = decode_completion(answer.answer, answer.request, expected)
            except RuntimeError:
                # Routes cannot be read if the server has died since it answered.
                try:
                    self._connection.check_alive(wait_s=REAP_S)
                except EngineLost as error:
                    opened.sender.note_loss(error)
                    raise
                raise
            self._note_answer(opened, answer, expected)
            yield completion

    def end(self, opened: OpenCall) -> None:
        """End a call, and abort its requests that are still in the server."""
        opened.sender.close()
        with self._changed:
            if opened in self._open:
                self._open.remove(opened)
                self._routes.close_call()
            self._changed.notify_all()

    def lose_all(self, error: EngineLost) -> None:
        """Make every open call raise `error`, because the server has ended."""
        with self._changed:
            for opened in self._open:
                opened.sender.lose(error)
                self._routes.close_call()
            self._open = []
            self.is_paused = self.is_held = False
            self._changed.notify_all()

    def end_all(self, error: RuntimeError) -> None:
        """Abort the requests of all open calls, and make each call's next completion raise `error`."""
        for sender in self._senders():
            sender.end(error)

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """Abort the requests with these ids, of all open calls. None aborts all requests."""
        for sender in self._senders():
            sender.abort(request_ids)

    def _senders(self) -> list[RequestSender]:
        with self._changed:
            return [opened.sender for opened in self._open]

    def pause(self, check: Callable[[], object], *, retract: bool) -> None:
        """Make calls that begin from now on wait until `resume`. `retract`: whether SGLang retracts the
        requests of open calls. If no call is open, first call `check`, which may raise."""
        with self._changed:
            if not self._open:  # no call can open between this check and the next line
                check()
            self.is_paused = True
            for opened in self._open:
                opened.retracted |= retract

    def resume(self) -> None:
        """Let new calls begin again after `pause`."""
        with self._changed:
            self.is_paused = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def quiet(self, check: Callable[[], object]) -> Iterator[None]:
        """Make calls of generate() that begin during the block wait until it ends. First call `check`,
        which may raise."""
        with self._changed:
            check()
            self.is_held = True
        try:
            yield
        finally:
            self.end_update(None)

    def begin_update(self, check: Callable[[], None], version: int) -> bool:
        """Make new calls wait until `end_update`. Return whether the engine is idle.

        Raises what `check` raises. Unless the engine is idle, raises ValueError if an open call or a
        cached prefix already has `version`, because old and new tokens could not be distinguished.
        """
        with self._changed:
            check()
            is_idle = not self._open and not self.is_paused
            used = {*self._in_cache, *self._in_keyed_cache}
            used.update(*(opened.versions for opened in self._open))
            if not is_idle and version in used:
                raise ValueError(
                    f"update_weights: version {version} is in the prefix cache or in flight already; "
                    "expected a new version, or an engine with nothing in flight"
                )
            self.is_held = True
            return is_idle

    def end_update(self, version: int | None) -> None:
        """Let new calls begin again, and record `version` as the version in force from now on.
        `version` is None if the update failed or there was none; then nothing is recorded."""
        with self._changed:
            self.is_held = False
            if version is not None:
                self._in_force(version)
            self._changed.notify_all()

    def _in_force(self, version: int) -> None:
        if any(not opened.is_keyed for opened in self._open):
            self._in_cache.append(version)
        for opened in self._open:
            opened.versions.append(version)
            if opened.is_keyed and self._adapter_of is None:
                self._note(opened.sender.pending, version)
        self._known.keep({version, *(v for opened in self._open for v in opened.versions)})

    def _context_of(
        self, opened: OpenCall, rids: Sequence[str], requests: Sequence[Request]
    ) -> SendContext:
        """Return the number of weight updates since the call began, and the cache key and adapter
        with which `requests` must be sent now. If the call is keyed, also record that the newest
        version may compute the tokens of these requests, whose SGLang ids are `rids`."""
        with self._changed:
            num_updates, version = len(opened.versions) - 1, opened.versions[-1]
            adapter = None if self._adapter_of is None else self._adapter_of(version)
            if not opened.is_keyed:
                return SendContext(num_updates, None, adapter)
            self._note(dict(zip(rids, requests, strict=True)), version)
            return SendContext(num_updates, version_key(version, opened.cache), adapter)

    def _note(self, requests: Mapping[str, Request], version: int) -> None:
        self._in_keyed_cache.add(version)
        for rid, request in requests.items():
            self._known.add(version, rid, request.token_ids)

    def _expected(self, opened: OpenCall, num_updates: int) -> Expected:
        """Return what an answer may contain if its request was sent after `num_updates` updates of the
        weights during this call."""
        with self._changed:
            versions = tuple(opened.versions[num_updates:])
            cached = versions[:1]
            if self._adapter_of is not None:
                versions = cached  # SGLang's cache keeps adapters apart even without keys
            elif not opened.is_keyed:
                earlier = opened.versions[: num_updates + 1]
                cached = tuple(dict.fromkeys((*opened.in_cache, *earlier)))
            return Expected(versions, cached, self._shape, opened.retracted, self._routes)

    def _note_answer(self, opened: OpenCall, answer: Answer, expected: Expected) -> None:
        """Record the tokens of a request with a cache key. Raise WrongWeights if it or an earlier
        request read cached tokens that no request with the same key has computed."""
        meta, output = answer.answer["meta_info"], answer.answer["output_ids"]
        if not opened.is_keyed:
            return
        prompt, versions = answer.request.token_ids, expected.versions
        if not output:  # aborted: it may have computed its prompt, and no more
            for version in versions:
                self._known.finish(version, answer.rid, prompt, None)
            return
        tokens = torch.cat([prompt, torch.tensor(output, dtype=prompt.dtype)])
        spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
        if was_retracted(meta, expected) or str(spans[0]["version"]) != str(versions[0]):
            for version in versions:  # it may have run under any of them
                self._known.finish(version, answer.rid, tokens, None)
            return
        num_cached, name = meta["cached_tokens"], answer.request.request_id
        self._known.finish(versions[0], answer.rid, tokens, num_cached, name)
        for version in versions[1:]:
            self._known.discard(version, answer.rid)
