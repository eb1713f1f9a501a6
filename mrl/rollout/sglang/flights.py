"""The calls of generate() that are open on one engine, and what its prefix cache may hold for each.

One call is *alone*: nothing else runs on the engine from its first request to its last answer. Calls
beside each other share the engine, from several threads, and weights may change under all of them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from mrl.config import RolloutConfig
from mrl.errors import RunFailed, WrongWeights
from mrl.rollout.base import Completion, EngineLost, Request
from mrl.rollout.sglang.body import version_key
from mrl.rollout.sglang.decode import Expected, RouteShape, decode_completion, was_retracted
from mrl.rollout.sglang.flight import Answer, Flight, LineUp, Sending
from mrl.rollout.sglang.prefixes import KnownPrefixes
from mrl.rollout.sglang.route_memory import RouteReader
from mrl.rollout.sglang.server import REAP_S, Server

LOOK_S = 0.2
"""Seconds between two looks at the server while a call waits for the weights."""


class OpenFlight:
    """A call of generate() between its first request and its last answer."""

    def __init__(
        self,
        *,
        is_alone: bool,
        is_keyed: bool,
        version: int,
        in_cache: Sequence[int],
        cache: str = "",
    ) -> None:
        self.is_alone = is_alone
        self.is_keyed = is_keyed
        """Its requests carry a key, so the prefix cache gives them what their own weights computed."""
        self.cache = cache
        """The end of that key: calls with another one read nothing of each other."""
        self.versions = [version]
        """Weight versions in force since it began, oldest first."""
        self.in_cache = tuple(in_cache)
        """Versions of which the cache held something without a key when it began, oldest first."""
        self.retracted = False
        self.flight: Flight


class Flights:
    """Keeps the account of an engine's open calls. Every method may be called from any thread."""

    def __init__(
        self,
        server: Server,
        routes: RouteReader,
        shape: RouteShape | None,
        config: RolloutConfig,
        adapter_of: Callable[[int], str | None] | None = None,
        *,
        shares_server: bool = False,
        line_up: LineUp | None = None,
    ) -> None:
        """`shape`: None where routes are off. Of `config` the time limits of requests count.
        `shares_server`: requests that are in no call of these run there too. `line_up`: requests wait
        at a gate.

        `adapter_of` is given where weights are versions of an adapter, and returns the name of one:
        a request then keeps the version that it was sent under, whatever comes later.
        """
        self._server = server
        self._routes = routes
        self._shape = shape
        self._config = config
        self._adapter_of = adapter_of
        self._shares_server = shares_server
        self._line_up = line_up
        self._open: list[OpenFlight] = []
        self._changed = threading.Condition()
        self._known = KnownPrefixes()
        self._in_cache: list[int] = []
        """Versions that filled the prefix cache without a key, oldest first."""
        self._in_keyed_cache: set[int] = set()
        self.is_paused = False
        self.is_held = False
        """The weights change, or something else runs on the engine that needs it alone."""

    @property
    def any_open(self) -> bool:
        """Whether a call of generate() is open."""
        return bool(self._open)

    @property
    def is_cache_empty(self) -> bool:
        """Whether nothing has filled the prefix cache since it was dropped."""
        return not (self._in_cache or self._in_keyed_cache)

    def versions_in_use(self) -> set[int]:
        """Return the versions under which requests in flight were sent, or may be about to be."""
        found: set[int] = set()
        with self._changed:
            for opened in self._open:
                for num_updates in opened.flight.pending_since():
                    since = (
                        slice(None) if num_updates is None else slice(num_updates, num_updates + 1)
                    )
                    found.update(opened.versions[since])
        return found

    def fill_cache(self, version: int) -> None:
        """Note whose keys and values the prefix cache is about to get, without a key."""
        with self._changed:
            if version not in self._in_cache:
                self._in_cache.append(version)

    def forget_cache(self) -> None:
        """Note that the prefix cache was dropped."""
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
    ) -> OpenFlight:
        """Open a call. One beside others waits while the engine is paused or its weights change.

        `cache` is that of `OpenFlight`. `check_ready` returns the weight version, or raises
        RuntimeError where the engine's state does not allow a call.
        Raises RuntimeError where another call forbids this one, ValueError for a request id that is in
        flight already, RunFailed past `rollout.request_timeout_s`.
        """
        deadline = time.monotonic() + self._config.request_timeout_s
        with self._changed:
            while not is_alone and (self.is_paused or self.is_held):
                self._changed.wait(LOOK_S)
                self._server.check_alive()
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
                    "what is open first, or give beside_others=True to all of them"
                )
            self._refuse_known_ids(requests)
            self._routes.open_call()
            if not is_keyed:
                self.fill_cache(version)
            opened = OpenFlight(
                is_alone=is_alone,
                is_keyed=is_keyed,
                version=version,
                in_cache=self._in_cache,
                cache=cache,
            )
            opened.flight = Flight(
                self._server,
                requests,
                return_routes=self._shape is not None,
                request_timeout_s=self._config.request_timeout_s,
                stall_timeout_s=self._config.stall_timeout_s,
                on_send=functools.partial(self._sending, opened),
                is_alone=is_alone and not self._shares_server,
                line_up=self._line_up,
            )
            self._open.append(opened)
            return opened

    def _refuse_known_ids(self, requests: Sequence[Request]) -> None:
        ids = {request.request_id for request in requests}
        for other in self._open:
            if known := ids & other.flight.request_ids:
                raise ValueError(
                    f"{min(known)}: a request with this id is in flight already, expected another id"
                )

    def completions(self, opened: OpenFlight) -> Iterator[Completion]:
        """Send the requests of a call, and yield completions as `RolloutEngine.generate` says."""
        for answer in opened.flight.answers():
            expected = self._expected(opened, answer.num_updates)
            try:
                completion = decode_completion(answer.answer, answer.request, expected)
            except RuntimeError:
                # The routes of a server that has died since it answered cannot be read.
                try:
                    self._server.check_alive(wait_s=REAP_S)
                except EngineLost as error:
                    opened.flight.note_loss(error)
                    raise
                raise
            self._note_answer(opened, answer, expected)
            yield completion

    def end(self, opened: OpenFlight) -> None:
        """End a call: leave none of its requests in the server."""
        opened.flight.close()
        with self._changed:
            if opened in self._open:
                self._open.remove(opened)
                self._routes.close_call()
            self._changed.notify_all()

    def lose_all(self, error: EngineLost) -> None:
        """Let every open call raise this: its server is no more."""
        with self._changed:
            for opened in self._open:
                opened.flight.lose(error)
                self._routes.close_call()
            self._open = []
            self.is_paused = self.is_held = False
            self._changed.notify_all()

    def end_all(self, error: RuntimeError) -> None:
        """Abort the requests of every open call and let it raise `error`, when it is next asked."""
        for flight in self.flights():
            flight.end(error)

    def flights(self) -> list[Flight]:
        """Return the flights of all open calls."""
        with self._changed:
            return [opened.flight for opened in self._open]

    def pause(self, check: Callable[[], None], *, retract: bool) -> None:
        """Record that the engine was paused, so calls that open later wait. If none is open, raises
        what `check` raises."""
        with self._changed:
            if not self._open:  # no call can open between this check and the next line
                check()
            self.is_paused = True
            for opened in self._open:
                opened.retracted |= retract

    def resume(self) -> None:
        """Note that the engine goes on."""
        with self._changed:
            self.is_paused = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def quiet(self, check: Callable[[], None]) -> Iterator[None]:
        """Let calls that are yet to open wait for the end of the block. Raises what `check` raises."""
        with self._changed:
            check()
            self.is_held = True
        try:
            yield
        finally:
            self.end_update(None)

    def begin_update(self, check: Callable[[], None], version: int) -> bool:
        """Let calls that are yet to open wait for the weights. Returns whether the engine is idle.

        Raises what `check` raises, and ValueError for a version that a request in flight, or the cache
        that it reads, has known already: its tokens could not be told apart.
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
        """Note the version that is in force from now on; None: the weights are a mixture."""
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
                self._note(opened.flight.pending, version)
        self._known.keep({version, *(v for opened in self._open for v in opened.versions)})

    def _sending(
        self, opened: OpenFlight, rids: Sequence[str], requests: Sequence[Request]
    ) -> Sending:
        """What holds for requests of this call that are about to be sent."""
        with self._changed:
            num_updates, version = len(opened.versions) - 1, opened.versions[-1]
            adapter = None if self._adapter_of is None else self._adapter_of(version)
            if not opened.is_keyed:
                return Sending(num_updates, None, adapter)
            self._note(dict(zip(rids, requests, strict=True)), version)
            return Sending(num_updates, version_key(version, opened.cache), adapter)

    def _note(self, requests: Mapping[str, Request], version: int) -> None:
        self._in_keyed_cache.add(version)
        for rid, request in requests.items():
            self._known.add(version, rid, request.token_ids)

    def _expected(self, opened: OpenFlight, num_updates: int) -> Expected:
        """Return what the answer to a request of this call may hold, sent after `num_updates`."""
        with self._changed:
            versions = tuple(opened.versions[num_updates:])
            cached = versions[:1]
            if self._adapter_of is not None:  # SGLang's cache keeps adapters apart, keys or not
                versions = cached
            elif not opened.is_keyed:
                earlier = opened.versions[: num_updates + 1]
                cached = tuple(dict.fromkeys((*opened.in_cache, *earlier)))
            return Expected(versions, cached, self._shape, opened.retracted, self._routes)

    def _note_answer(self, opened: OpenFlight, answer: Answer, expected: Expected) -> None:
        """Raise WrongWeights where a request with a key read what no request of that key computed."""
        meta, output = answer.answer["meta_info"], answer.answer["output_ids"]
        if not opened.is_keyed or not output:
            return
        prompt, versions = answer.request.token_ids, expected.versions
        tokens = torch.cat([prompt, torch.tensor(output, dtype=prompt.dtype)])
        spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
        if was_retracted(meta, expected) or str(spans[0]["version"]) != str(versions[0]):
            for version in versions:  # it may have run under any of them
                self._known.finish(version, answer.rid, tokens, None)
            return
        num_cached = meta["cached_tokens"]
        try:
            self._known.check(versions[0], answer.rid, prompt, num_cached)
        except WrongWeights as error:
            raise WrongWeights(f"{answer.request.request_id}: {error}") from None
        self._known.finish(versions[0], answer.rid, tokens, num_cached)
        for version in versions[1:]:
            self._known.discard(version, answer.rid)
