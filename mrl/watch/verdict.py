"""Decide whether a rank hangs, from the monitor's observations of all ranks. Does not import torch.

The rank at fault is a stopped rank or, if no rank is stopped, the rank that is furthest behind: all
ranks go through the same phases in the same order, and ranks that are ahead wait for the others. If
several ranks are in the same phase, the rank at fault is one that is not waiting inside the call of
a collective. On GPUs such a call can return while the collective is still queued. Then it is
unknown which rank waits for which. In that case the verdict names all ranks in the phase, except
those that are waiting inside the call of a collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mrl.system.heartbeat import LEFT, SUPERVISE, Collective, Pulse, Samples, kind_of

LEAST_LIMIT_S = 60.0
TIMES_LONGEST = 5.0
MAX_TICK_S = 1.0
"""The largest number of seconds that is counted for one tick. If more time has passed since the
last tick, the monitor did not run, for example because the whole job was suspended. Then the ranks
did not run either."""
STOPPED = ("T", "t")
GONE = ("Z", "X", "")
UNKNOWN = Pulse("", -1, 0, 0)
"""The pulse of a rank about which nothing is known yet."""


@dataclass(frozen=True)
class Limits:
    """How many seconds a rank may show no progress in a phase before it counts as hung."""

    given: Mapping[str, float]
    """The recipe's `watch.limits`: limits in seconds, by the kind of a phase (its name without the
    suffix after a colon). A phase whose kind is listed here has exactly this limit."""
    least: Mapping[str, float]
    """A lower bound, in seconds, on the limit of a phase, by the kind of the phase. The bound is
    large enough for waits that have time limits of their own (`mrl.watch.start.least_limits`)."""
    first_s: float
    """A lower bound, in seconds, on the limit of a phase that some rank has not yet completed once."""

    def of(self, phase: str, longest_s: float | None, *, is_stopped: bool = False) -> float:
        """Return the limit of a phase in seconds.

        `longest_s` is the longest time in seconds that any rank has gone without progress in this
        phase before it went on; None if some rank has not yet completed the phase once. `first_s`
        and `least` do not apply to a stopped rank, because it does not wait for anything.
        """
        kind = kind_of(phase)
        if kind in self.given:
            return self.given[kind]
        learned = max(LEAST_LIMIT_S, TIMES_LONGEST * (longest_s or 0.0))
        if is_stopped:
            return learned
        if longest_s is None:
            learned = max(learned, self.first_s)
        return max(learned, self.least.get(kind, 0.0))


class Observation(NamedTuple):
    """The state of a rank, as the monitor reads it in one tick."""

    pulse: Pulse
    state: str
    """The state of the process, a letter from /proc/PID/stat; empty if the process no longer exists."""
    collective: Collective = Collective()
    """The rank's last collective. It does not count as progress, because a rank may call
    collectives forever."""
    samples: Samples = Samples()
    """The rank's numbers of samples. They do not count as progress, because those of a trainer rank may
    be the numbers of other processes."""

    def text(self) -> str:
        """Return the phase, the process state and the last collective in one line, for a report."""
        if self.pulse.phase == UNKNOWN.phase:
            return "not known"
        last = self.collective.text()
        parts = [self.pulse.where, self.state or "gone"]
        return ", ".join([*parts, *([last] if last else [])])


class Verdict(NamedTuple):
    """The judgment that a rank hangs, or that it has shown no progress for half of its time limit."""

    rank: int
    how: str
    """What is wrong with the rank: `stopped`, `gone` (the process no longer exists), `stuck` (no
    progress), or `lost` (the rank's node no longer sends messages)."""
    pulse: Pulse
    since_s: float
    limit_s: float
    node: str = ""
    """The host name and the ranks of the node if `how` is `lost`; otherwise empty."""
    suspects: tuple[int, ...] = ()
    """All ranks that may be at fault, if it is not known which one is; otherwise empty. `rank` is
    one of them."""

    def text(self) -> str:
        """Return the verdict in one line."""
        if self.node:
            return (
                f"{self.node} sends nothing: {self.since_s:.1f} s, at most {self.limit_s:g} s; "
                f"before, rank {self.rank} was in phase {self.pulse.where}"
            )
        how = {"stopped": "is stopped (SIGSTOP)", "gone": "is gone"}.get(
            self.how, "makes no progress"
        )
        who = f"rank {self.rank}"
        if self.suspects:
            ranks = ", ".join(map(str, self.suspects))
            who = f"rank unknown: one of {ranks}, whose collectives are queued on GPUs,"
        return (
            f"{who} {how}: {self.since_s:.1f} s in phase {self.pulse.where}, whose limit "
            f"is {self.limit_s:g} s"
        )


_Work = tuple[str, str]
"""A phase and its tenant (a user of a service). Times measured in one tenant's phases do not apply
to another tenant."""


@dataclass
class _Rank:
    seen: Observation
    age_s: float = 0.0
    """The seconds since the rank last showed progress."""
    halted_s: float = 0.0
    """The seconds for which the process has been stopped or gone."""


def _how(rank: _Rank) -> str:
    """Return `stopped` or `stuck` for a rank without progress."""
    return "stopped" if rank.seen.state in STOPPED else "stuck"


@dataclass
class Watch:
    """Follows the ranks from tick to tick, and decides whether one of them hangs."""

    limits: Limits
    _ranks: list[_Rank] = field(default_factory=list)
    _longest_s: dict[_Work, float] = field(default_factory=dict)
    _through: dict[_Work, set[int]] = field(default_factory=dict)
    """For each phase and tenant, the ranks that have completed the phase at least once."""
    _warned: set[tuple[int, int]] = field(default_factory=set)

    def tick(self, seconds: float, ranks: Sequence[Observation]) -> Verdict | None:
        """Add the observations of all ranks, `seconds` after the last tick.

        Returns a verdict if a rank hangs, else None.
        """
        seconds = min(seconds, MAX_TICK_S)
        if not self._ranks:
            self._ranks = [_Rank(seen) for seen in ranks]
        for number, (rank, seen) in enumerate(zip(self._ranks, ranks, strict=True)):
            self._follow(number, rank, seen, seconds)
        return self._worst(1.0)

    def late(self) -> Verdict | None:
        """Return a verdict about a rank that has shown no progress for half of its limit, else None.

        A rank that is stuck counts only if other ranks are ahead of it and thus wait for it. At
        most one verdict is returned for a rank and a phase.
        """
        found = self._worst(0.5)
        if found is None or (found.rank, found.pulse.position) in self._warned:
            return None
        is_ahead = [r.seen.pulse.position > found.pulse.position for r in self._ranks]
        if found.how == "stuck" and not any(is_ahead):
            return None
        self._warned.add((found.rank, found.pulse.position))
        return found

    def _follow(self, number: int, rank: _Rank, seen: Observation, seconds: float) -> None:
        before, rank.seen = rank.seen, seen
        halted = seen.state in (*STOPPED, *GONE)
        rank.halted_s = rank.halted_s + seconds if halted else 0.0
        if seen.pulse == before.pulse:
            rank.age_s += seconds
            return
        work = before.pulse.phase, before.pulse.tenant
        is_other = seen.pulse.position != before.pulse.position
        if seen.pulse.tenant and is_other and seen.pulse.phase == "load":
            self._forget(seen.pulse.tenant)
        if before.state not in STOPPED:  # the time of a rank that a user stopped is not learned
            self._longest_s[work] = max(self._longest_s.get(work, 0.0), rank.age_s)
        if is_other:
            self._through.setdefault(work, set()).add(number)
        rank.age_s = 0.0

    def _forget(self, tenant: str) -> None:
        """Forget the measured phase times of a tenant that is loading.

        The tenant may be a new one that reuses the name of a former tenant.
        """
        for known in (self._longest_s, self._through):
            for work in [work for work in known if work[1] == tenant]:
                del known[work]

    def _worst(self, share: float) -> Verdict | None:
        """Return a verdict if the rank at fault has used up `share` of its time limit, else None."""
        halted = [v for n in range(len(self._ranks)) if (v := self._halted(n, share))]
        if halted:
            return max(halted, key=lambda verdict: verdict.since_s)
        watched = [n for n in range(len(self._ranks)) if self._is_watched(n)]
        for number in [n for n in watched if self._leads_engines(n)]:
            watched.remove(number)
            rank, limit = self._ranks[number], self._limit(number)
            if rank.age_s > share * limit:
                return Verdict(number, _how(rank), rank.seen.pulse, rank.age_s, limit)
        last = min((self._ranks[n].seen.pulse.position for n in watched), default=0)
        behind = [n for n in watched if self._ranks[n].seen.pulse.position == last]
        if not behind:
            return None
        if not all(self._ranks[n].age_s > share * self._limit(n) for n in behind):
            return None  # they may wait for one of them that still makes progress
        number = min(behind, key=self._blamed_first)
        rank, how = self._ranks[number], _how(self._ranks[number])
        free = [n for n in behind if not self._waits(n)] or behind
        is_open = how == "stuck" and any(self._ranks[n].seen.collective.is_queued for n in free)
        suspects = tuple(free) if is_open and len(free) > 1 else ()
        return Verdict(
            number, how, rank.seen.pulse, rank.age_s, self._limit(number), suspects=suspects
        )

    def _blamed_first(self, number: int) -> tuple[bool, int, float]:
        """Return a key that sorts ranks in the same phase by how likely they are at fault.

        Ranks that wait inside the call of a collective come last, because they wait for a rank that
        has not called this collective.
        """
        rank = self._ranks[number]
        return self._waits(number), rank.seen.pulse.beats, -rank.age_s

    def _waits(self, number: int) -> bool:
        """Return whether a rank is waiting inside the call of a collective."""
        collective = self._ranks[number].seen.collective
        return not (collective.is_over or collective.is_queued)

    def _halted(self, number: int, share: float) -> Verdict | None:
        rank = self._ranks[number]
        limit = self._limit(number, is_stopped=True)
        if not self._is_watched(number) or not rank.halted_s or rank.halted_s <= share * limit:
            return None
        how = "stopped" if rank.seen.state in STOPPED else "gone"
        return Verdict(number, how, rank.seen.pulse, rank.halted_s, limit)

    def _is_watched(self, number: int) -> bool:
        """Return whether a rank can be at fault, because it is known and has not finished the run."""
        return self._ranks[number].seen.pulse.phase not in (LEFT, UNKNOWN.phase)

    def _passes(self, number: int) -> bool:
        """Return whether a rank is known and goes through the phases of a step."""
        return self._ranks[number].seen.pulse.phase not in (SUPERVISE, UNKNOWN.phase)

    def _leads_engines(self, number: int) -> bool:
        """Return whether a rank leads engines, instead of going through the phases of a step."""
        return self._ranks[number].seen.pulse.phase == SUPERVISE

    def _limit(self, number: int, *, is_stopped: bool = False) -> float:
        pulse = self._ranks[number].seen.pulse
        work = pulse.phase, pulse.tenant
        passing = {n for n in range(len(self._ranks)) if self._passes(n)}
        is_through = passing <= self._through.get(work, set()) or self._leads_engines(number)
        longest = self._longest_s.get(work, 0.0) if is_through else None
        return self.limits.of(pulse.phase, longest, is_stopped=is_stopped)
