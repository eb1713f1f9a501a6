"""This module says what a source of scored sample groups must do.

`live.py` asks engines for them, `saved.py` reads files. Both give every rank the same groups in the
same order, so that everything that follows is the same on every rank, however many engines there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mrl.system.clock import Clock
from mrl.types import SampleGroup, Statistics
from parallel.policy import Policy


class Collector(Protocol):
    """Gives a step its scored groups. Every method is called on all ranks.

    The trainer calls `begin`; then, until `is_over`, it syncs the weights and calls `rollout` and
    `score`; then `groups` are the step's. One such round is the rule. There are more where an engine
    was lost and another one generates the rest, and where dynamic sampling draws further prompts.
    """

    start_text: str
    """What `start` does, for the terminal."""

    def start(self, policy: Policy) -> None:
        """Get ready, which may take long. The policy is on the device afterwards."""
        ...

    def begin(self, step: int, clock: Clock) -> None:
        """Choose the prompts of a step, and those of an evaluation that is due."""
        ...

    def begin_evaluation(self, version: int) -> None:
        """Evaluate weights `version` on the recipe's evaluation sets, and nothing else."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether everything that was begun has been generated and scored."""
        ...

    def sync(self, policy: Policy, version: int) -> None:
        """Bring the engines to the policy's weights, as `version`. A collective.

        Raises RunFailed where the export fails or the canaries disagree.
        """
        ...

    def rollout(self, clock: Clock) -> None:
        """Generate, or wait for what is generated elsewhere; times `rollout`."""
        ...

    def score(self, clock: Clock) -> None:
        """Give all ranks the groups of a round that is whole, with their rewards; times `score`."""
        ...

    @property
    def groups(self) -> list[SampleGroup]:
        """The step's groups in prompt order, with rewards."""
        ...

    @property
    def evaluation(self) -> dict[str, float]:
        """`eval/*` of the evaluation that was begun last; empty where a step had none."""
        ...

    def statistics(self) -> Statistics:
        """Return what this rank measured, under the same keys on every rank. Call it once a step."""
        ...

    def engine_spans(self) -> Sequence[Sequence[tuple[float, float, str]]]:
        """Return what each engine did since the last call, on rank 0: (begin, end, activity) in seconds
        since 1970; empty where engines and trainer take turns."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able state, on rank 0: what a resumed run needs to continue with its prompts."""
        ...

    def load_state_dict(
        self, state: dict[str, Any], step: int, *, other_data: bool = False
    ) -> None:
        """Continue at `step` from a `state_dict`, which another kind of collector may have written.
        With `other_data` only the part that does not depend on the prompts is used, and the prompts
        start over at the first one."""
        ...

    def close(self) -> None:
        """Leave no process behind. Safe to call twice, and after a failure."""
        ...
