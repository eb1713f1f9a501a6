"""The results of operations, and futures of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mrl.client.data import Sample
from mrl.errors import RunFailed
from mrl.service.client import ControlClient

T = TypeVar("T")
FIRST_POLL_S, LAST_POLL_S = 0.02, 1.0


class OperationFailed(RunFailed):
    """The service failed to carry out an operation, for the reason in the message. The session stays
    open."""


class OperationLost(RunFailed):
    """An operation was lost from the queue, because its session was paused, removed, or reopened at
    its newest checkpoint.

    Attach to a reopened session again with `ServiceClient.session`.
    """


class PassResult(NamedTuple):
    """The result of `forward_backward`."""

    loss: float
    """The loss, summed over all sequences."""
    logprobs: list[NDArray[np.float32]]
    """The current log-probs f32[T] of each sequence; 0 for tokens that are not in the loss."""
    metrics: dict[str, float]


class StepResult(NamedTuple):
    """The result of `optim_step`."""

    version: int
    """The version of the new weights."""
    grad_norm: float
    """The global gradient norm before clipping."""
    lr: float


class SavedCheckpoint(NamedTuple):
    """The result of `save`."""

    version: int
    folder: Path
    """The checkpoint folder, which `mrl export FOLDER DIR` converts to a PEFT adapter."""


class PromptLogprobs(NamedTuple):
    """The engine's log-probs of one prompt of P tokens, at temperature 1."""

    logprobs: NDArray[np.float32]
    """f32[P]; NaN for the first token, which has none."""
    top: list[list[tuple[int, float]]]
    """P - 1 lists of (token, log-prob): the likeliest tokens in the place of each token but the first;
    empty if none were asked for."""


class Future(Generic[T]):
    """Represents the result of an operation that was posted and may still be in the queue."""

    def __init__(
        self, client: ControlClient, session: str, operation: str, read: Callable[[Any], T]
    ) -> None:
        self.id = operation
        self._client, self._session, self._read = client, session, read
        self._found: dict[str, Any] | None = None

    def done(self) -> bool:
        """Return whether the operation has ended, successfully or not. Each call asks the service,
        unless an earlier call has already found that the operation has ended."""
        if self._found is None:
            found = self._client.operation(self._session, self.id)
            if found["state"] not in ("queued", "running"):
                self._found = found
        return self._found is not None

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the operation and return its result. Later calls return the same result again.

        If `timeout_s` is None, the wait has no limit; otherwise TimeoutError is raised after
        `timeout_s` seconds. Raises OperationFailed if the operation failed, OperationLost if it was
        lost, and NobodyListens if the service has ended.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        wait_s = FIRST_POLL_S
        while not self.done():
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"operation {self.id} is not done after {timeout_s:g} s")
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, LAST_POLL_S)
        assert self._found is not None
        if self._found["state"] == "done":
            return self._read(self._found["result"])
        kind = OperationFailed if self._found["state"] == "failed" else OperationLost
        raise kind(self._found["reason"])


def read_pass(found: dict[str, Any]) -> PassResult:
    return PassResult(found["loss"], arrays(found["logprobs"]), found["metrics"])


def read_samples(found: dict[str, Any], prompts: Sequence[list[int]]) -> list[list[Sample]]:
    return [
        [
            Sample(
                id=each["id"],
                prompt=np.array(prompt, np.int64),
                tokens=np.array(each["tokens"], np.int64),
                logprobs=np.array(each["logprobs"], np.float32),
                version=each["version"],
                stop_reason=each["stop_reason"],
            )
            for each in answers
        ]
        for prompt, answers in zip(prompts, found["samples"], strict=True)
    ]


def read_saved(found: dict[str, Any]) -> SavedCheckpoint:
    return SavedCheckpoint(found["version"], Path(found["folder"]))


def read_prompt_logprobs(found: dict[str, Any]) -> list[PromptLogprobs]:
    lists = found["prompt_logprobs"]
    tops = found.get("top_prompt_logprobs", [[]] * len(lists))
    return [
        PromptLogprobs(
            np.array([np.nan if each is None else each for each in logprobs], np.float32),
            [[(token, value) for token, value in each] for each in top[1:]],
        )
        for logprobs, top in zip(lists, tops, strict=True)
    ]


def arrays(lists: Sequence[Sequence[float]]) -> list[NDArray[np.float32]]:
    return [np.array(each, np.float32) for each in lists]
