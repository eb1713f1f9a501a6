"""This module holds the records of the ledger: leases, finished groups, partial rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Partial:
    """Holds the tokens of a prompt whose group was not finished when its worker reported them."""

    payload: Any
    """Opaque here."""
    oldest: int
    """The version that sampled the oldest token."""
    num_tokens: int


@dataclass(frozen=True)
class Lease:
    """Is the right of one worker to generate the group of one prompt."""

    lease_id: str
    """Never used twice, also not after a resume: `session:number`."""
    item_id: int
    """The number of the prompt in the order in which the cursor drew it."""
    prompt: Any
    """Opaque here."""
    worker: int
    version: int
    """The weights of the worker's engine when it asked."""
    partial: Partial | None = None
    """What an earlier worker left, to be continued."""

    @property
    def oldest(self) -> int:
        """No token of the group is older."""
        return self.version if self.partial is None else min(self.version, self.partial.oldest)

    def check_versions(self, oldest: int, newest: int, step: int) -> None:
        """Raise ValueError where the stamps `oldest` to `newest` of the tokens cannot be right."""
        if not self.oldest <= oldest <= newest <= step:
            raise ValueError(
                f"worker {self.worker} says that weights {oldest} to {newest} sampled the group of "
                f"lease {self.lease_id}, expected versions from {self.oldest} to {step}: the stamps of "
                "its engine are wrong"
            )


@dataclass(frozen=True)
class Finished:
    """Is a finished group in the queue."""

    item_id: int
    prompt: Any
    group: Any
    """Opaque here."""
    oldest: int
    """The version that sampled its oldest token."""
    newest: int
    num_tokens: int
    """Tokens that were generated for it."""

    def outline(self) -> dict[str, int]:
        """Return all but the payloads, JSON-able."""
        return {
            "id": self.item_id,
            "oldest": self.oldest,
            "newest": self.newest,
            "num_tokens": self.num_tokens,
        }

    @classmethod
    def restore(
        cls, outline: Mapping[str, int], prompts: Mapping[int, Any], groups: Mapping[int, Any]
    ) -> Finished:
        """Return the group of an `outline`; its payload is None where `groups` lacks it."""
        item_id = outline["id"]
        return cls(
            item_id,
            prompts[item_id],
            groups.get(item_id),
            outline["oldest"],
            outline["newest"],
            outline["num_tokens"],
        )
