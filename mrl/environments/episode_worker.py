"""Runs episodes in one worker process, many at a time, and replays them if the process is lost.

Each episode has at most one unanswered request. A thread sends the requests of all episodes and takes
the answers as they come. If the process is lost, a new one is started, and each episode that goes on is
replayed there: its requests are sent again, and the answers must be the same.

The episode whose request has made the process die or hang has failed. It is known if the process was
busy with one request only. Otherwise the requests with which it was busy are repeated alone, one after
another, so that no other episode fails in its place.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mrl.environments.calls import Call, Calls, Reply
from mrl.errors import RunFailed
from mrl.rewards.budget import Budget
from mrl.system.worker_process import BadReply, WorkerNotStarted, WorkerProcess

NOT_REPRODUCIBLE = (
    "another episode killed its process, and its answers differed when it was replayed: an environment "
    "must be determined by its seed"
)
ENDING = "the run is ending"
HELD_S = 1.0
"""Seconds after which a call that occupies its process keeps new episodes away from it."""

OnReply = Callable[[Reply | RunFailed], None]
"""Takes the reply to a request, or `{"error": reason}` if the episode has failed, or the error that
ends the run. It is called in the worker's thread, and must return at once."""


@dataclass(eq=False)
class _Episode:
    number: int
    process: int | None = None
    """The number of the process that has its environment; None if none has had it yet."""
    history: list[tuple[dict[str, Any], Reply]] = field(default_factory=list)
    """The requests that were answered, with their answers."""
    num_played: int = 0
    """How much of the history the process has played."""
    request: dict[str, Any] | None = None
    """The request that waits for its reply."""
    on_reply: OnReply | None = None
    is_asked: bool = False
    """Whether something was sent to the process that is not answered yet."""
    on_end: Callable[[], None] | None = None
    """Called when the environment is closed. If it is set, the episode is over."""


class EpisodeWorker:
    """Runs some of the episodes in one process, and starts a new process if that process is lost.

    The public methods may be called from any thread, and return at once unless their docstring says
    otherwise.
    """

    def __init__(self, process: WorkerProcess, what: str, limit_s: float, budget: Budget) -> None:
        """Begin to start the process; `started` tells the result. `what` names the environment in
        messages. An answer may take `limit_s` seconds, or what is left of `budget`."""
        self._process, self._what = process, what
        self.started: Future[None] = Future()
        self.num_replayed = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: Calls[_Episode] = Calls(process, limit_s, budget)
        self._number = 0
        """How many processes this worker has lost so far. The number also identifies the current
        process."""
        self._episodes: dict[int, _Episode] = {}
        self._unsent: dict[_Episode, None] = {}
        """The episodes for which something has to be sent, the oldest first."""
        self._alone: deque[_Episode] = deque()
        """The episodes with which a lost process was busy. Their requests are repeated alone."""
        self._ends_at = math.inf
        """When this worker ends, even if environments are not closed yet."""
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="mrl-episodes", daemon=True)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Whether one call has occupied the process for more than HELD_S."""
        began = self._calls.busy_since
        return began is not None and time.monotonic() - began > HELD_S

    def begin(self, number: int, request: dict[str, Any], on_reply: OnReply) -> None:
        """Begin an episode with its first request."""
        self._command(partial(self._begin, _Episode(number), request, on_reply))

    def ask(self, number: int, request: dict[str, Any], on_reply: OnReply) -> None:
        """Send the next request to an episode that has answered the last one and is not over."""
        self._command(partial(self._ask, number, request, on_reply))

    def end(self, number: int, on_end: Callable[[], None]) -> None:
        """End an episode, also while a request is unanswered, whose answer is then dropped. `on_end` is
        called when its environment is closed, or at once if the process with it was lost."""
        self._command(partial(self._end_number, number, on_end))

    def finish(self, limit_s: float) -> None:
        """End all episodes, and then the worker's thread, after `limit_s` seconds at the latest."""
        self._command(partial(self._finish, time.monotonic() + limit_s))

    def join(self, timeout_s: float) -> None:
        """Wait until the worker's thread has ended after `finish`, but at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    def kill(self) -> None:
        """Kill the process, and wait for the end of the worker's thread. May be called more than
        once."""
        self.finish(0.0)
        self._process.close()
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._calls.wake()
        if self._has_ended:
            self._take_commands()

    def _run(self) -> None:
        try:
            self._process.start()
            self.started.set_result(None)
            while self._is_going_on:
                self._take_commands()
                self._send_all()
                self._exchange()
        except BaseException as error:
            if self.started.done():
                raise
            self.started.set_exception(error)
        finally:
            self._calls.end()
            self._has_ended = True
            for episode in list(self._episodes.values()):
                self._reply(episode, {"error": ENDING})
            self._take_commands()

    @property
    def _is_going_on(self) -> bool:
        if self._ends_at == math.inf:
            return True
        return time.monotonic() < self._ends_at and bool(self._calls or self._unsent)

    def _take_commands(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _begin(self, episode: _Episode, request: dict[str, Any], on_reply: OnReply) -> None:
        self._episodes[episode.number] = episode
        self._ask(episode.number, request, on_reply)

    def _ask(self, number: int, request: dict[str, Any], on_reply: OnReply) -> None:
        episode = self._episodes.get(number)
        if self._has_ended or episode is None or episode.on_end is not None:
            on_reply({"error": ENDING})
            return
        episode.request, episode.on_reply = request, on_reply
        self._unsent[episode] = None

    def _end_number(self, number: int, on_end: Callable[[], None]) -> None:
        episode = self._episodes.get(number)
        if episode is None or self._has_ended:
            on_end()
        else:
            self._end(episode, on_end)

    def _end(self, episode: _Episode, on_end: Callable[[], None]) -> None:
        """Close the environment of an episode, as soon as it has answered its last request."""
        episode.request = episode.on_reply = None
        episode.on_end = on_end
        if not episode.is_asked:
            self._unsent[episode] = None

    def _finish(self, ends_at: float) -> None:
        self._ends_at = min(self._ends_at, ends_at)
        for episode in list(self._episodes.values()):
            self._reply(episode, {"error": ENDING})
            if episode.on_end is None:
                self._end(episode, lambda: None)

    def _send_all(self) -> None:
        """Send what can be sent now."""
        while self._unsent and not (self._alone and self._calls):
            if time.monotonic() >= self._ends_at:
                return
            episode = self._alone[0] if self._alone else next(iter(self._unsent))
            del self._unsent[episode]
            if episode.on_end is not None and episode.process != self._number:
                self._forget(episode)
                continue
            try:
                self._send(episode)
            except (RunFailed, WorkerNotStarted) as error:
                # An import may be slow, so its failure counts for all that wait for the process.
                reply = error if isinstance(error, RunFailed) else {"error": str(error)}
                for each in (episode, *self._unsent):
                    self._reply(each, reply)
                self._unsent = {each: None for each in self._unsent if each.on_end is not None}

    def _send(self, episode: _Episode) -> None:
        """Send the next request of an episode. Start a process first if there is none."""
        if episode.on_end is not None:
            self._calls.send(episode, {"end": episode.number}, is_counted=False)
        else:
            self._calls.restart()
            if episode.process != self._number:
                self.num_replayed += bool(episode.history)
                episode.process, episode.num_played = self._number, 0
            is_replay = episode.num_played < len(episode.history)
            request = episode.history[episode.num_played][0] if is_replay else episode.request
            assert request is not None
            self._calls.send(episode, request)
        episode.is_asked = True

    def _exchange(self) -> None:
        """Wait for answers, commands or the end of a time limit, and take the answers."""
        try:
            for call, reply in self._calls.receive(self._ends_at):
                call.owner.is_asked = False
                self._take(call, reply)
        except (OSError, EOFError, BadReply) as error:
            self._lose(error)

    def _take(self, call: Call[_Episode], reply: Reply) -> None:
        episode = call.owner
        if "end" in call.request:
            self._forget(episode)
        elif episode.on_end is not None:
            self._unsent[episode] = None
        elif episode.num_played < len(episode.history):
            if "error" not in reply and reply != episode.history[episode.num_played][1]:
                reply = {"error": NOT_REPRODUCIBLE}
            if "error" in reply:
                self._reply(episode, reply)
            else:
                episode.num_played += 1
                self._unsent[episode] = None
        else:
            episode.history.append((call.request, reply))
            episode.num_played += 1
            self._reply(episode, reply)

    def _reply(self, episode: _Episode, reply: Reply | RunFailed) -> None:
        """Reply to the episode's request."""
        if episode in self._alone:
            self._alone.remove(episode)
        on_reply, episode.request, episode.on_reply = episode.on_reply, None, None
        if on_reply is not None:
            on_reply(reply)

    def _forget(self, episode: _Episode) -> None:
        del self._episodes[episode.number]
        if episode in self._alone:
            self._alone.remove(episode)
        if episode.on_end is not None:
            episode.on_end()

    def _lose(self, error: Exception) -> None:
        """Take note that the process has ended or must be killed. The next one will repeat what is
        unanswered, except for the request that was the cause."""
        loss = self._calls.lose(error)
        self._number += 1
        (culprit,) = loss.suspects if len(loss.suspects) == 1 else (None,)
        if culprit is not None and culprit.begun_at is None and culprit.owner not in self._alone:
            culprit = None  # what ended the process may be something that was begun earlier
        for call in loss.calls:
            episode = call.owner
            episode.is_asked = False
            if episode.on_end is not None:
                self._forget(episode)
            elif call is culprit:
                self._reply(episode, {"error": loss.reason})
            else:
                self._unsent[episode] = None
                if call in loss.suspects and episode not in self._alone:
                    self._alone.append(episode)
        if culprit is not None and "end" in culprit.request:
            print(f"{self._what}: close() of an episode: {loss.reason}", file=sys.stderr)
