"""Sessions of a service, and the operations that a training loop posts to them."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrl.client.data import Datum, Ids, Sample, ids
from mrl.client.futures import (
    FIRST_POLL_S,
    Future,
    OperationFailed,
    OperationLost,
    PassResult,
    PromptLogprobs,
    SavedCheckpoint,
    StepResult,
    T,
    arrays,
    read_pass,
    read_prompt_logprobs,
    read_samples,
    read_saved,
)
from mrl.errors import InputError
from mrl.service.client import ControlClient, NobodyListens


class Session:
    """A session for one training loop.

    A method that returns a Future posts an operation and does not wait for its result. The service
    carries out the operations in the order of the calls.

    A method raises InputError if the service refuses its request. A method that returns a Future
    raises OperationLost if the session has been reopened since this object was made.
    """

    def __init__(self, client: ControlClient, name: str) -> None:
        """Attach to an existing session. Raises InputError if the service has no session of this
        name."""
        self.name, self._client = name, client
        found = client.tenant(name)
        self._sequence: int = found["sequence"]
        """The sequence number of the session's tenant, which distinguishes it from a later tenant with
        the same name."""
        self.life: str = self._session(found)["session"]["life"]
        """An id that changes whenever the session is reopened."""

    def status(self) -> dict[str, Any]:
        """Return the state of the session: the JSON object that `GET /tenants/NAME` returns.

        Raises InputError for a tenant that is not a session, and OperationLost if the session was
        removed and another tenant has its name.
        """
        found = self._client.tenant(self.name)
        if found["sequence"] != self._sequence:
            raise OperationLost(f"session {self.name} was removed, and another tenant has its name")
        return self._session(found)

    def _session(self, found: dict[str, Any]) -> dict[str, Any]:
        if found["loop"] != "client":
            raise InputError(
                f"tenant {self.name} is no session: the service runs the training loop of its recipe"
            )
        return found

    @property
    def version(self) -> int | None:
        """The version of the weights; None until the session is open."""
        return self.status()["session"]["version"]

    def wait_open(self, timeout_s: float = 600.0) -> int:
        """Wait until the session is open; return the version of its weights.

        Raises TimeoutError after `timeout_s` seconds. Raises OperationFailed, with the reason, if
        the session is paused, done or removed.
        """
        end = time.monotonic() + timeout_s
        while (found := self.status())["session"]["version"] is None:
            if found["state"] not in ("queued", "running"):
                raise OperationFailed(f"session {self.name} is {found['state']}: {found['reason']}")
            if time.monotonic() >= end:
                raise TimeoutError(f"session {self.name} is not open after {timeout_s:g} s")
            time.sleep(5 * FIRST_POLL_S)
        return found["session"]["version"]

    def forward_backward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", **options: Any
    ) -> Future[PassResult]:
        """Compute a loss. Its gradients are added to the gradients of earlier calls since the last
        optimizer step.

        docs/client.md lists the losses and their `options`. The options `all_logprobs` and `replay` are
        for every loss.
        """
        body = {"loss": loss, "sequences": [each.body() for each in data], **options}
        return self._post("forward_backward", body, read_pass)

    def forward(self, data: Sequence[Datum | Ids]) -> Future[list[NDArray[np.float32]]]:
        """Compute the log-probs f32[T] of each sequence under the current weights. The log-prob of
        the first token is 0."""
        data = [each if isinstance(each, Datum) else Datum(each) for each in data]
        body = {
            "sequences": [
                {
                    "tokens": ids(d.tokens),
                    "targets": None if d.targets is None else ids(d.targets),
                    "sample": d.sample,
                }
                for d in data
            ]
        }
        return self._post("forward", body, lambda found: arrays(found["logprobs"]))

    def optim_step(self, lr: float | None = None, **settings: float) -> Future[StepResult]:
        """Take a step of Adam with the accumulated gradients. `lr` replaces the recipe's learning
        rate in this step; None keeps it. So do the `settings` beta1, beta2, eps, weight_decay and
        clip_grad (0 does not clip)."""
        body = settings if lr is None else {"lr": lr, **settings}
        return self._post("optim_step", body, lambda found: StepResult(**found))

    def drop_gradients(self) -> Future[int]:
        """Drop the accumulated gradients. The result is the version of the weights, which stay."""
        return self._post("drop_gradients", {}, lambda found: found["version"])

    def sample(
        self, prompts: Sequence[Ids], *, max_tokens: int, n: int = 1, **options: Any
    ) -> Future[list[list[Sample]]]:
        """Sample `n` answers to each prompt i64[P] with the current weights.

        `options` are temperature, top_p, top_k, min_tokens, stop, stop_token_ids, seed, and `sampler`:
        the name of a saved sampler, or "@base" for the base model, with which to sample instead.
        """
        asked = [ids(prompt) for prompt in prompts]
        body = {"prompts": asked, "n": n, "max_tokens": max_tokens, **options}
        return self._post("sample", body, lambda found: read_samples(found, asked))

    def prompt_logprobs(
        self, prompts: Sequence[Ids], *, top: int = 0, sampler: str | None = None
    ) -> Future[list[PromptLogprobs]]:
        """Compute the engine's log-probs of each prompt i64[P], and the `top` likeliest tokens in the
        place of each token. `sampler` is that of `sample`."""
        body = {"prompts": [ids(prompt) for prompt in prompts], "max_tokens": 1, "sampler": sampler}
        asked = {"prompt_logprobs": True, "top_prompt_logprobs": top}
        return self._post("sample", body | asked, read_prompt_logprobs)

    def save(self, name: str | None = None, *, overwrite: bool = False) -> Future[SavedCheckpoint]:
        """Write a checkpoint of the current weights and of Adam's state. With a `name` it is kept until
        you remove it; `overwrite` allows to replace one of that name."""
        body = {} if name is None else {"name": name, "overwrite": overwrite}
        return self._post("save", body, read_saved)

    def save_sampler(self, name: str, *, overwrite: bool = False) -> Future[SavedCheckpoint]:
        """Save the current weights as a sampler, which `sample` can use while training goes on."""
        return self._post("save_sampler", {"name": name, "overwrite": overwrite}, read_saved)

    def load(
        self,
        version: int | None = None,
        *,
        name: str | None = None,
        folder: str | Path | None = None,
        optimizer: bool = True,
    ) -> Future[int]:
        """Load a checkpoint: the one that this session saved at `version` or as `name`, or the one in
        `folder`, which may be another session's. Adam's state is loaded too; without `optimizer`, Adam
        and its learning-rate schedule restart. The result is the new version number of the weights."""
        path = None if folder is None else os.path.abspath(folder)
        given = {"version": version, "name": name, "folder": path}
        body = {key: value for key, value in given.items() if value is not None}
        return self._post("load", {**body, "optimizer": optimizer}, lambda found: found["version"])

    def encode(self, text: str) -> list[int]:
        """Tokenize `text` with the tokenizer of the service's model, and return the token ids. No
        special tokens are added."""
        return self._client.encode([text])[0]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Apply the model's chat template to `messages` (with `role` and `content`) and `tools`, and
        return the token ids. With `add_generation_prompt`, the ids end with the tokens that begin the
        assistant's answer."""
        return self._client.encode_chat(
            {
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "tools": None if tools is None else list(tools),
            }
        )

    def decode(self, tokens: Ids, *, skip_special: bool = True) -> str:
        """Return the text of token ids i64[T]; `skip_special` leaves out special tokens."""
        return self._client.decode([ids(tokens)], skip_special=skip_special)[0]

    def pause(self, reason: str | None = None) -> None:
        """Save the session and free its resources for other tenants. Operations that are still in
        the session's queue are lost."""
        self._client.pause(self.name, reason, self._sequence)

    def resume(self) -> None:
        """Reopen a paused session. This object remains attached to it."""
        self._client.resume(self.name, self._sequence)
        self.life = self.status()["session"]["life"]

    def remove(self) -> None:
        """Remove the session from the service; its run folder remains."""
        self._client.remove(self.name, self._sequence)

    def _post(self, kind: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> Future[T]:
        own = {"kind": kind, "life": self.life, "key": secrets.token_hex(8)}
        try:
            posted = self._client.post(self.name, {**own, **body})
        except NobodyListens:
            raise
        except InputError:
            if self.status()["session"]["life"] != self.life:
                raise OperationLost(
                    f"session {self.name} was reopened, at version {self.version}; attach to it again "
                    "with ServiceClient.session"
                ) from None
            raise
        return Future(self._client, self.name, posted["id"], read)


class ServiceClient:
    """A client of a service that runs on this machine. The service is identified by its folder."""

    def __init__(self, service: str | Path, wait_s: float = 0.0) -> None:
        """Connect to the service whose output_dir is `service`, and wait until it listens.

        If the service is starting, wait at most 15 minutes, or `wait_s` seconds if that is longer.
        If it has not been started, wait at most `wait_s` seconds. Raises NobodyListens if the
        service does not listen within this time.
        """
        self.control = ControlClient(Path(service))
        """The client of the service's control socket, for tenants and metrics."""
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
        """Create a session and return without waiting until it is open. Operations can be posted
        immediately; the service carries them out once the session is open.

        `weight` is the session's scheduling weight: its share of the trainer's time and of the
        engine, relative to the other tenants' weights. `lora` is the section `lora` of a recipe.
        `recipe` may contain the key `seed` and the sections `optimizer`, `moe`, `train`, `rollout`
        and `checkpoint`, each a mapping; docs/client.md lists their keys. Raises InputError if the
        service refuses the session.
        """
        tree = {"lora": dict(lora), "output_dir": os.path.abspath(output_dir), **recipe}
        self.control.add(name, tree, weight, loop="client")
        return Session(self.control, name)

    def session(self, name: str) -> Session:
        """Attach to an existing session. Raises InputError if the service has no session of this
        name."""
        return Session(self.control, name)
