"""The records of the ledger (ledger.py): leases, finished groups, partial rollouts and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Partial:
    """A partial rollout: the tokens that were generated for a prompt whose group is not
    finished."""

    payload: Any
    """The unfinished group. The ledger does not read it."""
    oldest: int
    """The oldest version of the weights that sampled any of the tokens."""
    num_tokens: int


@dataclass(frozen=True)
class Lease:
    """The right of one worker to generate the group of one prompt."""

    lease_id: str
    """`session:number`. It is unique even after a resume, because a resumed run has another
    `session`."""
    item_id: int
    """The number of the prompt, in the order in which prompts were drawn."""
    prompt: Any
    """The prompt, which the ledger only passes on."""
    worker: int
    version: int
    """The version of the engine's weights when the prompt was leased."""
    partial: Partial | None = None
    """A partial rollout from another worker, to be continued; None if the group starts without
    tokens."""

    @property
    def oldest(self) -> int:
        """The oldest version of the weights that may have sampled a token of the group."""
        return self.version if self.partial is None else min(self.version, self.partial.oldest)

    def check_versions(self, oldest: int, newest: int, step: int) -> None:
        """Check the versions `oldest` to `newest`, which according to the worker sampled the
        group's tokens. Raise ValueError unless they lie between this lease's oldest version and
        `step`, the trainer's next step."""
        if not self.oldest <= oldest <= newest <= step:
            raise ValueError(
                f"worker {self.worker} says that weights {oldest} to {newest} sampled the group of "
                f"lease {self.lease_id}, expected versions from {self.oldest} to {step}: the stamps of "
                "its engine are wrong"
            )


@dataclass(frozen=True)
class Finished:
    """A finished group that waits for a step to train on it."""

    item_id: int
    group: Any
    """The group, which the ledger only passes on."""
    oldest: int
    """The oldest version of the weights that sampled any of the group's tokens."""
    num_tokens: int
    """Number of tokens that were generated for the group."""


@dataclass
class Tally:
    """Counters over the whole run, except `staleness`, which covers only the last step."""

    trained: int = 0
    """Number of prompts that a step has trained on."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of prompts that were dropped, by cause."""
    duplicates: int = 0
    """Number of groups that arrived after their lease had ended."""
    discarded_tokens: int = 0
    """Number of generated tokens that no step will train on."""
    kept_tokens: int = 0
    """Number of tokens in partial rollouts that a later lease has continued."""
    staleness: Counter[int] = field(default_factory=Counter)
    """The number of groups that the last step trained on, by staleness: how many versions older
    than the trainer's weights the group's oldest token was. It is not saved in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        state = {**vars(self), "dropped": dict(self.dropped)}
        del state["staleness"]
        return state

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Tally:
        """Return the tally from the result of its `state_dict`."""
        return cls(**{**state, "dropped": Counter(state["dropped"])})

    def metrics(self, max_staleness: int) -> dict[str, float]:
        """Return the counts as metrics `async/*`. Staleness has one metric for each age from 0 to
        `max_staleness`."""
        counts = {
            "async/duplicates": self.duplicates,
            "async/discarded_tokens": self.discarded_tokens,
            "async/kept_tokens": self.kept_tokens,
        }
        counts |= {f"async/dropped/{cause}": count for cause, count in self.dropped.items()}
        ages = range(max_staleness + 1)
        counts |= {f"async/staleness/{age}": self.staleness[age] for age in ages}
        return {key: float(count) for key, count in counts.items()}
