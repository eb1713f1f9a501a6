"""A seeded position in a data set that can be saved and resumed without loss or repetition."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from mrl.errors import InputError
from mrl.types import Prompt


class PromptCursor:
    """Deals prompts in a fresh permutation per epoch; a batch may straddle epochs.

    Its whole state is (seed, shuffle, epoch, offset) and the identity of the data: the
    permutation of an epoch is computed from (seed, epoch) alone.
    """

    def __init__(self, prompts: list[Prompt], *, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise InputError("the data set has no prompts")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._offset = 0
        self._order = self._permutation()
        self._digest = _digest(prompts)

    @property
    def epoch(self) -> int:
        """The number of whole passes over the data set so far."""
        return self._epoch

    def next(self, n: int) -> list[Prompt]:
        """Return the next n prompts."""
        batch = []
        for _ in range(n):
            batch.append(self._prompts[self._order[self._offset]])
            self._offset += 1
            if self._offset == len(self._prompts):
                self._epoch += 1
                self._offset = 0
                self._order = self._permutation()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able state; `load_state_dict` of it continues with exactly the next prompt."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "offset": self._offset,
            "num_prompts": len(self._prompts),
            "sha256": self._digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; the order's seed comes from the state.

        Raises InputError if the state belongs to other data.
        """
        if state["num_prompts"] != len(self._prompts):
            raise InputError(
                f"cannot resume: the checkpoint was made with {state['num_prompts']} prompts, "
                f"the data file has {len(self._prompts)}; restore the file or start a new run"
            )
        if state["sha256"] != self._digest:
            raise InputError(
                f"cannot resume: the {len(self._prompts)} prompts are not those of the checkpoint "
                f"(SHA-256 {self._digest[:12]}, expected {state['sha256'][:12]}); restore the "
                "file or start a new run"
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            # A string seeds through SHA-512: no collisions between (1, 23) and (12, 3).
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


def _digest(prompts: list[Prompt]) -> str:
    """Return the SHA-256 of what the policy and the reward see, without the file's name and path."""
    sha = hashlib.sha256()
    for prompt in prompts:
        row = [prompt.token_ids.tolist(), prompt.content, prompt.columns]
        sha.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return sha.hexdigest()
