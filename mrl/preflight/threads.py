"""Choose the number of CPU threads for a run's trainer ranks and engines."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config import Recipe
from mrl.preflight.engine_layout import node_ranks
from mrl.system.threads import SMALLEST_WIDTH, given_threads, shared_threads, usable_cores


@dataclass(frozen=True)
class CpuThreads:
    """The number of CPU threads of each trainer and engine process, and the reason for this number."""

    number: int
    why: str

    def describe(self) -> str:
        """Return the number of threads and the reason as a text for `mrl check`."""
        return f"{self.number} for each trainer rank and engine: {self.why}"


def choose_threads(recipe: Recipe, width: int, world: int) -> CpuThreads:
    """Choose the number of threads for a model with the hidden size `width` on `world` ranks.

    If the recipe gives a number as `train.cpu_threads`, the result is this number. Otherwise it is
    OMP_NUM_THREADS, if the user has set it. If neither is given, the result is the number of this
    machine's cores per rank, or 1 for a small `width`. Colocated engines take turns with the
    trainer and get the same number.
    """
    if recipe.train.cpu_threads != "auto":
        return CpuThreads(recipe.train.cpu_threads, "train.cpu_threads")
    if given := given_threads():
        return CpuThreads(given, "OMP_NUM_THREADS")
    num_ranks = node_ranks(world)
    number = shared_threads(width, num_ranks)
    if width < SMALLEST_WIDTH:
        why = f"products of width {width} are too small for more"
    else:
        why = f"{usable_cores()} core(s) for {num_ranks} rank(s)"
    return CpuThreads(number, why)
