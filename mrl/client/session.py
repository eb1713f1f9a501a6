"""This module asks a session of a service for one operation after the other."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mrl.client.data import Datum, Ids, Sample, ids
from mrl.errors import InputError, RunFailed
from mrl.tenants.client import ControlClient, NobodyListens

T = TypeVar("T")
FIRST_POLL_S, LAST_POLL_S = 0.02, 1.0


class OperationFailed(RunFailed):
    """The service could not carry out an operation: the message is its own. The session goes on."""


class OperationLost(RunFailed):
    """The session was opened anew, so what was in its queue is lost: it is at its newest checkpoint.
    `ServiceClient.session` attaches to it again."""


class Passed(NamedTuple):
    """A `Passed` holds what `forward_backward` gave."""

    loss: float
    """The sum over sequences."""
    logprobs: list[NDArray[np.float32]]
    """f32[T] of each sequence; 0 where a token is not in the loss."""
    metrics: dict[str, float]


class Stepped(NamedTuple):
    """A `Stepped` holds what `optim_step` gave."""

    version: int
    """That of the new weights."""
    grad_norm: float
    """Before clipping."""
    lr: float


class Saved(NamedTuple):
    """A `Saved` says where a checkpoint is."""

    version: int
    folder: Path
    """`mrl export FOLDER DIR` writes it as an adapter of PEFT."""


class Future(Generic[T]):
    """A `Future` is an operation that was posted."""

    def __init__(
        self, client: ControlClient, session: str, operation: str, read: Callable[[Any], T]
    ) -> None:
        self.id = operation
        self._client, self._session, self._read = client, session, read
        self._found: dict[str, Any] | None = None

    def done(self) -> bool:
        """Ask the service whether the operation is over."""
        if self._found is None:
            found = self._client.operation(self._session, self.id)
            if found["state"] not in ("queued", "running"):
                self._found = found
        return self._found is not None

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the operation, and return what it gave.

        Raises OperationFailed and OperationLost, TimeoutError after `timeout_s`, and NobodyListens
        where the service has ended. It can be called again.
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


class Session:
    """A `Session` belongs to one loop. Its operations are carried out in the order of the calls, and
    each call returns at once.

    Every method raises InputError where the service refuses what it is asked, and OperationLost where
    the session was opened anew since this object was made.
    """

    def __init__(self, client: ControlClient, name: str) -> None:
        """Attach to a session that is there. Raises InputError where it is not."""
        self.name, self._client = name, client
        found = client.tenant(name)
        self._sequence: int = found["sequence"]
        """The number of the tenant, because the name may be used again later."""
        self.life: str = self._session(found)["session"]["life"]
        """Changes whenever the session is opened anew."""

    def status(self) -> dict[str, Any]:
        """Return the session as `GET /tenants/NAME` does. Raises InputError for a tenant that is not a
        session, and OperationLost if it was removed and its name belongs to another tenant."""
        found = self._client.tenant(self.name)
        if found["sequence"] != self._sequence:
            raise OperationLost(f"session {self.name} was removed, and another tenant has its name")
        return self._session(found)

    def _session(self, found: dict[str, Any]) -> dict[str, Any]:
        if found["loop"] != "client":
            raise InputError(f"tenant {self.name} has the loop of its recipe, and is no session")
        return found

    @property
    def version(self) -> int | None:
        """The version of the weights; None while the session waits to be opened."""
        return self.status()["session"]["version"]

    def wait_open(self, timeout_s: float = 600.0) -> int:
        """Wait until the session is open; return its version. Raises OperationFailed where it was
        paused, with the reason, and TimeoutError."""
        end = time.monotonic() + timeout_s
        while (found := self.status())["session"]["version"] is None:
            if found["state"] not in ("queued", "running"):
                raise OperationFailed(f"session {self.name} is {found['state']}: {found['reason']}")
            if time.monotonic() >= end:
                raise TimeoutError(f"session {self.name} is not open after {timeout_s:g} s")
            time.sleep(5 * FIRST_POLL_S)
        return found["session"]["version"]

    def forward_backward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", **options: float
    ) -> Future[Passed]:
        """Add the gradients of a loss to those since the last optimizer step.

        `loss`: cross_entropy, importance_sampling, ppo or cispo. `options`: clip_low, clip_high and
        dual_clip, for the last two.
        """
        body = {"loss": loss, "sequences": [each.body() for each in data], **options}
        return self._post("forward_backward", body, _read_passed)

    def forward(self, data: Sequence[Datum | Ids]) -> Future[list[NDArray[np.float32]]]:
        """Compute log-probs f32[T] under the present weights; the first is 0."""
        bodies = [
            {"tokens": ids(d.tokens), "sample": d.sample}
            if isinstance(d, Datum)
            else {"tokens": ids(d)}
            for d in data
        ]
        return self._post(
            "forward", {"sequences": bodies}, lambda found: _arrays(found["logprobs"])
        )

    def optim_step(self, lr: float | None = None) -> Future[Stepped]:
        """Take a step of Adam with the gradients since the last one. `lr` takes the place of the
        recipe's in this step."""
        body = {} if lr is None else {"lr": lr}
        return self._post("optim_step", body, lambda found: Stepped(**found))

    def sample(
        self, prompts: Sequence[Ids], *, max_tokens: int, n: int = 1, **options: Any
    ) -> Future[list[list[Sample]]]:
        """Draw `n` answers to each prompt i64[P] from the present weights; in the order of the prompts.

        `options`: temperature, top_p, top_k, min_tokens, stop, stop_token_ids and seed.
        """
        asked = [ids(prompt) for prompt in prompts]
        body = {"prompts": asked, "n": n, "max_tokens": max_tokens, **options}
        return self._post("sample", body, lambda found: _read_samples(found, asked))

    def save(self) -> Future[Saved]:
        """Write a checkpoint of the present weights and of Adam's state."""
        return self._post("save", {}, lambda found: Saved(found["version"], Path(found["folder"])))

    def load(self, version: int) -> Future[int]:
        """Go back to a checkpoint of this session, which gets a new version; return that."""
        return self._post("load", {"version": version}, lambda found: found["version"])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text from the tokenizer of the service's model, without adding
        special tokens."""
        return self._client.encode([text])[0]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Return the token ids of messages (`role`, `content`) in the model's chat template, with the
        beginning of the answer if `add_generation_prompt`."""
        body: dict[str, Any] = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        if tools is not None:
            body["tools"] = list(tools)
        return self._client.encode_chat(body)

    def decode(self, tokens: Ids, *, skip_special: bool = True) -> str:
        """Return the text of token ids i64[T]; `skip_special`: without special tokens."""
        return self._client.decode([ids(tokens)], skip_special=skip_special)[0]

    def pause(self, reason: str | None = None) -> None:
        """Save the session and let others have its place; what waits in its queue is lost."""
        self._client.pause(self.name, reason, self._sequence)

    def resume(self) -> None:
        """Put a paused session back, which begins a new life: this object goes on with it."""
        self._client.resume(self.name, self._sequence)
        self.life = self.status()["session"]["life"]

    def remove(self) -> None:
        """End the session for good; its run folder stays."""
        self._client.remove(self.name, self._sequence)

    def _post(self, kind: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> Future[T]:
        own = {"kind": kind, "life": self.life, "key": secrets.token_hex(8)}
        try:
            posted = self._client.post(self.name, {**own, **body})
        except InputError as error:
            if isinstance(error, NobodyListens):
                raise
            if self.status()["session"]["life"] != self.life:
                raise OperationLost(
                    f"session {self.name} was opened anew, at version {self.version}; attach to it "
                    "again with ServiceClient.session"
                ) from None
            raise
        return Future(self._client, self.name, posted["id"], read)


class ServiceClient:
    """Knows a service on this machine by its folder, and makes sessions on it."""

    def __init__(self, service: str | Path, wait_s: float = 0.0) -> None:
        """Wait until the service with the output_dir `service` listens, if it is starting; if it has
        not been started yet, wait at most `wait_s` seconds for that. Raises NobodyListens."""
        self.control = ControlClient(Path(service))
        """The tenants of the service, and its metrics."""
        self.control.wait_until_listening(wait_s)

    def create_session(
        self,
        name: str,
        *,
        output_dir: str | Path,
        lora: Mapping[str, Any],
        weight: float = 1.0,
        **recipe: Any,
    ) -> Session:
        """Create a session and return it. Operations may be posted at once: they wait until it is open.

        `lora` and `recipe` are branches of a recipe: optimizer, seed, moe, train, rollout, checkpoint,
        of which docs/client.md lists the keys. Raises InputError for what the service refuses.
        """
        tree = {"lora": dict(lora), "output_dir": os.path.abspath(output_dir), **recipe}
        self.control.add(name, tree, weight, loop="client")
        return Session(self.control, name)

    def session(self, name: str) -> Session:
        """Attach to a session that is there. Raises InputError where it is not."""
        return Session(self.control, name)


def _read_passed(found: dict[str, Any]) -> Passed:
    return Passed(found["loss"], _arrays(found["logprobs"]), found["metrics"])


def _read_samples(found: dict[str, Any], prompts: Sequence[list[int]]) -> list[list[Sample]]:
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


def _arrays(lists: Sequence[Sequence[float]]) -> list[NDArray[np.float32]]:
    return [np.array(each, np.float32) for each in lists]
