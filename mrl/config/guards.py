"""What stops a run, or warns, before an update."""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class GuardConfig(Branch):
    ratio_tolerance: float | None = Field(default=None, gt=0)
    """Largest |log-prob - old log-prob| of a token before the first update of a start: both are of the
    same weights. By default 1e-4 in float32 and 0.1 in half precision; above it the run stops."""
    clip_budget: float = Field(default=0.1, gt=0)
    """Share of the clip range of a sequence ratio (GSPO: 3e-4) that the trainer's own noise may take
    before the first update; above it a warning says that sequences clip before they have learnt."""
