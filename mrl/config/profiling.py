"""Configuration of profiling: which steps, on which ranks and engines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mrl.config.branch import Branch

Number = Annotated[int, Field(ge=0)]


class ProfileConfig(Branch):
    steps: tuple[Number, ...] = ()
    """Steps to profile, by their number in metrics.jsonl: [10, 12] profiles two steps. The traces go to
    OUTPUT_DIR/profile/; see docs/logging.md."""
    ranks: tuple[Number, ...] = (0,)
    """Numbers of the trainer ranks that write a trace with torch.profiler."""
    engine: bool = True
    """Also request traces from the rollout engines."""
    with_stack: bool = False
    """Record Python source lines in the traces of trainer ranks and engines. Traces become larger
    and slower to record."""
