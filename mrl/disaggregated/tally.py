"""This module keeps the counts of prompts and tokens over the whole run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts; all but `staleness` are in the checkpoint."""

    trained: int = 0
    """Prompts that some step trained on."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Prompts that no step will train on, by cause."""
    duplicates: int = 0
    """Groups that came under a lease that was taken away or had ended."""
    discarded_tokens: int = 0
    """Tokens that were generated for nothing."""
    kept_tokens: int = 0
    """Tokens of partial rollouts that a later lease of their prompt began with."""
    staleness: Counter[int] = field(default_factory=Counter)
    """The last batch: number of groups whose oldest token was so many versions old."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "duplicates": self.duplicates,
            "discarded_tokens": self.discarded_tokens,
            "kept_tokens": self.kept_tokens,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Tally:
        """Return what `state_dict` was called on."""
        return cls(**{**state, "dropped": Counter(state["dropped"])})

    def metrics(self, max_staleness: int) -> dict[str, float]:
        """Return the counts as metrics."""
        counts = {
            "async/duplicates": self.duplicates,
            "async/discarded_tokens": self.discarded_tokens,
            "async/kept_tokens": self.kept_tokens,
        }
        counts |= {f"async/dropped/{cause}": count for cause, count in self.dropped.items()}
        ages = range(max_staleness + 1)
        counts |= {f"async/staleness/{age}": self.staleness[age] for age in ages}
        return {key: float(count) for key, count in counts.items()}
