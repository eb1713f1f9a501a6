"""Configuration of the watchdog, which ends a run that hangs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.branch import Branch

Phase = Literal[
    "start", "load", "sync", "rollout", "score", "logprobs", "train", "save", "evaluate", "log"
]


class WatchConfig(Branch):
    enabled: bool = True
    """Watch the ranks from a separate process, and end the run with exit code 72 if one hangs; see
    docs/faults.md."""
    limits: dict[Phase, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Seconds without progress after which a phase is considered hung, by the name of the phase:
    start, load, sync, rollout, score, logprobs, train, save, evaluate, or log. For a phase that is
    not listed, the limit is the largest of 60 s, five times its longest time without progress so
    far, and the time that the recipe's own limits allow for it."""
    first_limit_s: float = Field(default=1800.0, gt=0)
    """The minimum time limit of a phase, in seconds. It applies only while some rank has not yet
    completed the phase once, and not to phases listed in `limits`."""
