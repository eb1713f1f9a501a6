"""The interface of the policy that decides which requests a gate (gate.py) admits to an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Demand:
    """The KV memory that a tenant uses and asks for, in tokens of prompts and answers."""

    tenant: str
    weight: float
    num_waiting: int
    """Number of the tenant's requests that have not been sent to the engine yet."""
    tokens_each: int
    """Tokens that each waiting request is expected to hold when it ends
    (`AdmissionPolicy.tokens_each`)."""
    tokens_in_flight: int
    """Tokens that the tenant's requests in the engine are expected to hold when they end."""
    max_tokens_in_flight: int
    """The tenant's limit for `tokens_in_flight`."""


class AdmissionPolicy(Protocol):
    """Decides how many requests of each tenant are sent to the engine.

    `mrl.service.schedule.Admission` implements it. The gate calls it from any thread, one call at a
    time.
    """

    def tokens_each(self, tenant: str, max_tokens: int) -> int:
        """Return how many tokens of KV memory a request of the tenant is expected to hold when it ends.
        The result is at most `max_tokens`, the length of the prompt plus the longest allowed answer."""
        ...

    def admit(
        self, free_tokens: int, capacity_tokens: int, demands: Sequence[Demand]
    ) -> Mapping[str, int]:
        """Return how many of each tenant's waiting requests to send now. `capacity_tokens` is the size
        of the KV memory. `free_tokens` is `capacity_tokens` minus the tokens in flight of all tenants,
        or 0 if that is negative."""
        ...

    def finished(self, tenant: str, num_tokens: int) -> None:
        """Record that a request of the tenant finished with `num_tokens` tokens, prompt and answer."""
        ...

    def leave(self, tenant: str) -> None:
        """Forget a tenant."""
        ...
