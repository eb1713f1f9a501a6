"""Check the profiling settings of a recipe."""

from __future__ import annotations

from mrl.config.profiling import ProfileConfig
from mrl.errors import InputError


def check_profile(config: ProfileConfig, world: int) -> None:
    """Raise InputError if steps are to be profiled on a rank that is not among the `world` ranks."""
    if not config.steps:
        return
    outside = sorted(rank for rank in config.ranks if rank >= world)
    if outside:
        raise InputError(
            f"profile.ranks: got {outside}, and this start has the ranks 0 to {world - 1}"
        )
