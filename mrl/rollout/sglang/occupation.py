"""What of a server's memory is on its device: weights, KV cache and CUDA graphs come and go by tags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mrl.rollout.base import CUDA_GRAPH, KV_CACHE, MEMORY_TAGS, WEIGHTS
from mrl.rollout.sglang.server import Server


class Occupation:
    """Keeps the account of one engine's tags, and moves them."""

    def __init__(self, server: Server, *, can_keep: bool, can_drop: bool) -> None:
        """`can_keep`: the weights have a copy in host memory while they sleep. `can_drop`: updates
        bring them back where they have none."""
        self._server = server
        self._can_keep, self._can_drop = can_keep, can_drop
        self._awake: set[str] = set()

    @property
    def asleep(self) -> list[str]:
        """The tags that are not on the device, in the order in which they wake."""
        return [tag for tag in MEMORY_TAGS if tag not in self._awake]

    def reset(self, awake: Iterable[str] = ()) -> None:
        """Note what is awake of a server that has started, or was stopped."""
        self._awake = set(awake)

    def check_level(self, level: int, state: str) -> None:
        """Raises ValueError for an unknown level of sleep, RuntimeError for one that this engine cannot
        wake from."""
        if level not in (1, 2):
            raise ValueError(f"sleep: got level {level}, expected 1 (keep weights) or 2 (drop)")
        if level == 1 and not self._can_keep:
            raise RuntimeError(
                "sleep(1): the engine was built without keep_weights_on_host, so its weights "
                f"cannot be kept; use sleep(2). It is {state}"
            )
        if level == 2 and not self._can_drop:
            raise RuntimeError(
                "sleep(2): updates bring an adapter, so nothing would bring back the weights that it "
                f"drops; use sleep(1). It is {state}"
            )

    def wake(self, tags: Sequence[str]) -> None:
        """Take memory back for those of `tags` that sleep. Raises ValueError for an unknown one."""
        unknown = set(tags) - set(MEMORY_TAGS)
        if unknown:
            raise ValueError(
                f"wake: got tags {sorted(unknown)}, expected some of {', '.join(MEMORY_TAGS)}"
            )
        wanted = [tag for tag in self.asleep if tag in tags]
        if wanted:
            self._server.post("/resume_memory_occupation", {"tags": wanted})
            self._awake |= set(wanted)

    def release(self, settle: Callable[[], None]) -> None:
        """Give all memory back that is awake, after `settle` has waited for an idle scheduler."""
        # The cache first: what reads the weights must be gone before they are.
        tags = [tag for tag in (KV_CACHE, CUDA_GRAPH, WEIGHTS) if tag in self._awake]
        if tags:
            # The last answer leaves a moment before the scheduler is idle, and a release before
            # that kills the server: wait, also where the cache is known to be empty.
            settle()
            self._server.post("/release_memory_occupation", {"tags": tags})
            self._awake -= set(tags)
