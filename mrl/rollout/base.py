"""What the trainer asks of a rollout engine.

One engine's life:

    start() -> wake(WEIGHTS) -> update_weights() -> wake(KV_CACHE, CUDA_GRAPH) -> generate()
            -> sleep(level) -> wake(WEIGHTS) -> ... -> stop()

After start() everything is resident and the weights are the checkpoint's. An engine that is asked
for something its state does not allow raises RuntimeError that names the state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mrl.types import Prompt, SampleGroup, WeightBucket

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"
MEMORY_TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
"""What an engine holds on the device and can give back, in the order in which it wakes."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled. Greedy is `temperature=0`."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """No end of sequence before this many tokens; equal to max_new_tokens for one exact length."""
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end-of-sequence ids."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: expected 0 to max_new_tokens ({self.max_new_tokens}), got "
                f"{self.min_new_tokens}"
            )
        if self.temperature < 0:
            raise ValueError(f"temperature: expected 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected above 0 and at most 1, got {self.top_p}")


class RolloutEngine(Protocol):
    """A file of mrl/rollout/ offers one as `Engine`, or as a function `build_engine`.

    The constructor's keywords are those of `mrl.rollout.sglang.Engine`. All methods block.
    """

    def start(self) -> None:
        """Load the checkpoint and get ready to generate; `weight_version` is the first version.

        Raises InputError for what the user can mend in the recipe, RuntimeError with the log's last
        lines and its path where the engine dies or is not ready in time, and where it runs already.
        """
        ...

    @property
    def weight_version(self) -> int | None:
        """The version that generate() would use; None where the weights were dropped."""
        ...

    def wake(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take device memory back for `tags`; a tag that is awake already is left alone.

        Weights dropped by sleep(2) come back as memory without contents: update_weights() next.
        Raises ValueError for an unknown tag.
        """
        ...

    def sleep(self, level: int = 2) -> None:
        """Give device memory back. Level 1 keeps the weights in host memory, level 2 drops them.

        The prefix cache is lost either way. What sleeps already is left alone. Raises ValueError
        for another level, RuntimeError where the engine was not built for level 1.
        """
        ...

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Load a whole model, bucket by bucket, and drop the prefix cache.

        Needs WEIGHTS awake. Names are Hugging Face's; the last bucket says so (`is_last`). Raises
        ValueError where a bucket carries another version, or a weight is missing, unknown, repeated or
        of another shape, and RuntimeError where the engine refuses a bucket. After an error the weights
        are a mixture: generate() is refused until an update succeeds.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int,
        sampling: SamplingParams,
        seed: int,
        first_group_id: int = 0,
    ) -> list[SampleGroup]:
        """One group a prompt, in order; group i has group_id `first_group_id + i`.

        A sample's tokens are drawn with `sample_seed(seed, prompt_id, index)`. Rewards are left
        None. Needs every tag awake. Raises ValueError for a prompt that is empty or too long for
        the context, RuntimeError where the engine dies, answers with other weights than were last
        pushed, or with a length that does not fit, and TimeoutError past the request time limit.
        """
        ...

    def stop(self) -> None:
        """Leave no process behind. Harmless when repeated or never started."""
        ...


def sample_seed(seed: int, prompt_id: str, index: int) -> int:
    """The sampling seed of sample `index` of a prompt: 63 bits, stable across runs and machines."""
    text = f"{seed}/{index}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
