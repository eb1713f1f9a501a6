"""The faults that a drill can provoke, in the table FAULTS.

Each fault has a function that provokes it in a `Drill` and returns a `Row`. `make faults` tests
more faults than this table has.
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
    """The result of provoking one fault."""

    fault: str
    """The name of the fault."""
    did: str
    """What the drill did to the run, in one line."""
    happened: str
    """What happened after the fault, in one line."""
    seconds: float
    """Seconds from the fault until all processes had ended, or until the run had done the step
    in which it recovered."""
    verdict: Verdict
    """`recovered` if the run continued, `refused` if mrl refused to start or to go on, `not
    provoked` if the fault cannot be provoked here. The verdict is valid only if `passed` is
    true."""
    exit_code: int | None = None
    """The exit code of the job that the fault ended; None if no job ended."""
    problems: tuple[str, ...] = ()
    """A phrase for each way in which the result was not as expected."""

    @property
    def passed(self) -> bool:
        """Whether the result was as expected."""
        return not self.problems


@dataclass(frozen=True)
class Fault:
    """A fault that a drill can provoke."""

    name: str
    did: str
    provoke: Callable[[Drill], Row]
    why_not: Callable[[Recipe], str]
    """A function that returns the reason why the fault cannot be provoked in a recipe; an empty
    string if it can be provoked."""


FAULTS: dict[str, Fault] = {}
"""All faults by name, in the order in which a drill provokes them."""
NOT_PROVOKED = {
    "network partition": "a drill runs on one node, and does not cut the network of others; make "
    "faults cuts one between two network namespaces",
    "loss of a node": "a drill runs on one node; docs/slurm.md has the table of what was tried with "
    "a real SLURM",
    "stop of a supervisor": "it only starts workers, so nothing waits for it until its worker is lost; "
    "kill-supervisor ends it",
    "full disk": "others may use the file system; each start checks that there is room for two "
    "checkpoints",
}
"""The faults that a drill never provokes, by name, with the reason."""


def never(recipe: Recipe) -> str:
    """Return an empty string. This is the `why_not` of faults that can be provoked in every recipe."""
    return ""


def fault(
    name: str, did: str, why_not: Callable[[Recipe], str] = never
) -> Callable[[Callable[[Drill], Row]], Callable[[Drill], Row]]:
    """Return a decorator that adds a function to FAULTS as the fault `name`.

    `did` describes in one line what the fault does to the run.
    """

    def add(provoke: Callable[[Drill], Row]) -> Callable[[Drill], Row]:
        FAULTS[name] = Fault(name, did, provoke, why_not)
        return provoke

    return add
