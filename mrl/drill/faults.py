"""This module holds the one list of faults that a drill can provoke; `make faults` tries more.

A fault is a function of a `Drill` that provokes it and returns a `Row`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mrl.config import Recipe

if TYPE_CHECKING:
    from mrl.drill.chain import Drill

Verdict = Literal["recovered", "refused", "not provoked"]


@dataclass(frozen=True)
class Row:
    """A `Row` is what came of one fault."""

    fault: str
    """The name of the fault."""
    did: str
    """What was done to the run, in one line."""
    happened: str
    """What came of it, in one line."""
    seconds: float
    """Seconds from the fault to the end of all processes, or to the step in which it was overcome."""
    verdict: Verdict
    """How it ended; `not provoked` where the fault cannot be provoked here."""
    exit_code: int | None = None
    """The exit code of the start that the fault ended; None where it ended none."""
    problems: tuple[str, ...] = ()
    """What is not as it should be; empty where the row has passed."""

    @property
    def passed(self) -> bool:
        """Whether everything was as it should be."""
        return not self.problems


@dataclass(frozen=True)
class Fault:
    """A `Fault` is one row of the table before it is tried."""

    name: str
    did: str
    provoke: Callable[[Drill], Row]
    why_not: Callable[[Recipe], str]
    """Returns why a recipe cannot be drilled for it; empty where it can."""


FAULTS: dict[str, Fault] = {}
"""Every fault by its name, in the order in which a drill provokes them."""
NOT_PROVOKED = {
    "network partition": "a drill runs on one node, and does not cut the network of others; make "
    "faults cuts one between two network namespaces",
    "loss of a node": "a drill runs on one node; docs/slurm.md has the table of what was tried with "
    "a real SLURM",
    "stop of a supervisor": "it only starts workers, so nothing waits for it until its worker is lost; "
    "kill-supervisor ends it",
    "full disk": "the file system may be others'; each start checks that there is room for two "
    "checkpoints",
}
"""Faults that a drill leaves alone, and why."""


def never(recipe: Recipe) -> str:
    """Return no reason against a fault: it can be provoked in every recipe."""
    return ""


def fault(
    name: str, did: str, why_not: Callable[[Recipe], str] = never
) -> Callable[[Callable[[Drill], Row]], Callable[[Drill], Row]]:
    """Add a function to the list. `did` says in one line what is done to the run."""

    def add(provoke: Callable[[Drill], Row]) -> Callable[[Drill], Row]:
        FAULTS[name] = Fault(name, did, provoke, why_not)
        return provoke

    return add
