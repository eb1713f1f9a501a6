"""The device memory of a server, whose parts (weights, KV cache, CUDA graphs) sleep and wake by tag."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mrl.engines.base import CUDA_GRAPH, KV_CACHE, MEMORY_TAGS, WEIGHTS
from mrl.engines.sglang.connection import ServerConnection


class DeviceMemory:
    """Keeps track of which tags are awake (on the device), and wakes tags or puts them to sleep."""

    def __init__(self, connection: ServerConnection, *, can_keep: bool, can_drop: bool) -> None:
        """`can_keep`: whether host memory can hold a copy of the weights while they sleep. `can_drop`:
        whether the next update contains all weights, so that no copy is needed."""
        self._connection = connection
        self._can_keep, self._can_drop = can_keep, can_drop
        self._awake: set[str] = set()

    @property
    def asleep(self) -> list[str]:
        """The tags that are not on the device, in the order in which they wake."""
        return [tag for tag in MEMORY_TAGS if tag not in self._awake]

    def reset(self, awake: Iterable[str] = ()) -> None:
        """Record that only the tags `awake` are awake: all tags after a start, none after a stop."""
        self._awake = set(awake)

    def check_level(self, level: int, state: str) -> None:
        """Raise ValueError for an unknown sleep level, and RuntimeError for a level after which this
        engine would have no weights. `state`, the engine's state in words, is part of the message."""
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
        """Wake those of `tags` that sleep. Raises ValueError for an unknown tag."""
        unknown = set(tags) - set(MEMORY_TAGS)
        if unknown:
            raise ValueError(
                f"wake: got tags {sorted(unknown)}, expected some of {', '.join(MEMORY_TAGS)}"
            )
        wanted = [tag for tag in self.asleep if tag in tags]
        if wanted:
            self._connection.post("/resume_memory_occupation", {"tags": wanted})
            self._awake |= set(wanted)

    def release(self, flush: Callable[[], None]) -> None:
        """Call `flush`, which waits until the scheduler is idle, and then release all memory that is
        awake."""
        # The cache first, because it must be gone before the weights that filled it.
        tags = [tag for tag in (KV_CACHE, CUDA_GRAPH, WEIGHTS) if tag in self._awake]
        if tags:
            # The scheduler becomes idle a moment after its last answer, and a release before that
            # kills the server: wait for it even if the cache is known to be empty.
            flush()
            self._connection.post("/release_memory_occupation", {"tags": tags})
            self._awake -= set(tags)
