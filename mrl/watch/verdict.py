"""Decides, from what is read of the ranks, whether one of them hangs: without torch.

The rank at fault is one that is stopped, else the one furthest behind: all ranks pass the same phases
in the same order, and those that are ahead wait for it. Of several in the same phase it is one that
waits in no collective. GPUs do collectives later than the ranks ask for them: where one is only queued,
it does not say who waits for whom, and the verdict names all ranks of the phase that wait in no call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mrl.system.heartbeat import LEFT, SUPERVISE, Collective, Pulse, kind_of

LEAST_LIMIT_S = 60.0
TIMES_LONGEST = 5.0
MAX_TICK_S = 1.0
"""A tick counts as no more: where the monitor itself did not run, as when the whole job was suspended,
the ranks did not run either."""
STOPPED = ("T", "t")
GONE = ("Z", "X", "")
UNKNOWN = Pulse("", -1, 0, 0)
"""What a rank shows of which nothing is known yet."""


@dataclass(frozen=True)
class Limits:
    """`Limits` are the seconds that a phase may take without progress."""

    given: Mapping[str, float]
    """The recipe's `watch.limits`, by phase without its part; they replace all other limits."""
    least: Mapping[str, float]
    """What the own waits of a phase may take, by its name; 0 where they have no limits."""
    first_s: float
    """The limit of a phase until every rank has been through it."""

    def of(self, phase: str, longest_s: float | None, *, is_stopped: bool = False) -> float:
        """Return the limit of a phase; `longest_s` is its longest time without progress so far, None
        before it was over once. A stopped rank waits for nothing that could have a limit of its own."""
        kind = kind_of(phase)
        if kind in self.given:
            return self.given[kind]
        learned = max(LEAST_LIMIT_S, TIMES_LONGEST * (longest_s or 0.0))
        if is_stopped:
            return learned
        if longest_s is None:
            learned = max(learned, self.first_s)
        return max(learned, self.least.get(kind, 0.0))


class Seen(NamedTuple):
    """What is read of a rank in one tick."""

    pulse: Pulse
    state: str
    """The letter of /proc/PID/stat; empty where the process is gone."""
    collective: Collective = Collective()
    """No sign of progress: a rank may run through collectives for ever."""

    def text(self) -> str:
        """Say where the rank is, for a report."""
        if self.pulse.phase == UNKNOWN.phase:
            return "not known"
        last = self.collective.text()
        parts = [self.pulse.where, self.state or "gone"]
        return ", ".join([*parts, *([last] if last else [])])


class Verdict(NamedTuple):
    """A rank that hangs, or that is about to."""

    rank: int
    how: str
    """stopped, gone, stuck, or lost: of a node that is not heard from."""
    pulse: Pulse
    since_s: float
    limit_s: float
    node: str = ""
    """The node that is lost, and its ranks."""
    suspects: tuple[int, ...] = ()
    """The ranks of which each may be at fault, where what they show does not tell; `rank` is one of
    them. Empty where it is known."""

    def text(self) -> str:
        """Say it in one line."""
        if self.node:
            return (
                f"{self.node} is not heard from: {self.since_s:.1f} s, at most {self.limit_s:g} s; "
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
"""A phase and the tenant whose work it is: one tenant's steps say nothing of another's."""


@dataclass
class _Rank:
    seen: Seen
    age_s: float = 0.0
    """How long it shows no progress."""
    halted_s: float = 0.0
    """How long it is stopped or gone."""


def _how(rank: _Rank) -> str:
    """Return how a rank without progress hangs; a stopped rank showed its last progress before that."""
    return "stopped" if rank.seen.state in STOPPED else "stuck"


@dataclass
class Watch:
    """Follows the ranks tick by tick."""

    limits: Limits
    _ranks: list[_Rank] = field(default_factory=list)
    _longest_s: dict[_Work, float] = field(default_factory=dict)
    _through: dict[_Work, set[int]] = field(default_factory=dict)
    """The ranks that have been through a phase."""
    _warned: set[tuple[int, int]] = field(default_factory=set)

    def tick(self, seconds: float, ranks: Sequence[Seen]) -> Verdict | None:
        """Take in what the ranks show `seconds` after the tick before; return who hangs, or None."""
        seconds = min(seconds, MAX_TICK_S)
        if not self._ranks:
            self._ranks = [_Rank(seen) for seen in ranks]
        for number, (rank, seen) in enumerate(zip(self._ranks, ranks, strict=True)):
            self._follow(number, rank, seen, seconds)
        return self._worst(1.0)

    def late(self) -> Verdict | None:
        """Return a rank that keeps the others waiting for more than half of its limit; each once."""
        found = self._worst(0.5)
        if found is None or (found.rank, found.pulse.position) in self._warned:
            return None
        is_ahead = [r.seen.pulse.position > found.pulse.position for r in self._ranks]
        if found.how == "stuck" and not any(is_ahead):
            return None
        self._warned.add((found.rank, found.pulse.position))
        return found

    def _follow(self, number: int, rank: _Rank, seen: Seen, seconds: float) -> None:
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
        if before.state not in STOPPED:  # what a user stopped and continued teaches nothing
            self._longest_s[work] = max(self._longest_s.get(work, 0.0), rank.age_s)
        if is_other:
            self._through.setdefault(work, set()).add(number)
        rank.age_s = 0.0

    def _forget(self, tenant: str) -> None:
        """Forget the times of a tenant that loads: it may be another one of the same name."""
        for known in (self._longest_s, self._through):
            for work in [work for work in known if work[1] == tenant]:
                del known[work]

    def _worst(self, share: float) -> Verdict | None:
        """Return the rank at fault where it is over `share` of its limit."""
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
            return None  # those that are as far may wait for the one that still moves
        number = min(behind, key=self._blamed_first)
        rank, how = self._ranks[number], _how(self._ranks[number])
        free = [n for n in behind if not self._waits(n)] or behind
        is_open = how == "stuck" and any(self._ranks[n].seen.collective.is_queued for n in free)
        suspects = tuple(free) if is_open and len(free) > 1 else ()
        return Verdict(
            number, how, rank.seen.pulse, rank.age_s, self._limit(number), suspects=suspects
        )

    def _blamed_first(self, number: int) -> tuple[bool, int, float]:
        """Return the key that sorts ranks of one position: one that waits in a collective waits for one
        that does not."""
        rank = self._ranks[number]
        return self._waits(number), rank.seen.pulse.beats, -rank.age_s

    def _waits(self, number: int) -> bool:
        """Whether a rank waits in the call of a collective."""
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
        """Whether a rank can be at fault: not where it has left, or nothing is known of it yet."""
        return self._ranks[number].seen.pulse.phase not in (LEFT, UNKNOWN.phase)

    def _passes(self, number: int) -> bool:
        """Whether a rank goes through the phases of a step; one that is not known does not count."""
        return self._ranks[number].seen.pulse.phase not in (SUPERVISE, UNKNOWN.phase)

    def _leads_engines(self, number: int) -> bool:
        """Whether a rank leads engines, and goes through no phases."""
        return self._ranks[number].seen.pulse.phase == SUPERVISE

    def _limit(self, number: int, *, is_stopped: bool = False) -> float:
        pulse = self._ranks[number].seen.pulse
        work = pulse.phase, pulse.tenant
        passing = {n for n in range(len(self._ranks)) if self._passes(n)}
        is_through = passing <= self._through.get(work, set()) or self._leads_engines(number)
        longest = self._longest_s.get(work, 0.0) if is_through else None
        return self.limits.of(pulse.phase, longest, is_stopped=is_stopped)
