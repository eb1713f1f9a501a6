"""An honest client of a session: random operations that follow from a seed, and what came of each.

What it does next depends on its seed and on earlier results of its own alone, so two services that
keep sessions apart give two clients of one seed the same results, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mrl.client import Datum, Sample, ServiceClient, Session
from mrl.client.session import Future, OperationFailed
from parallel.checkpoint.saved_tensors import SavedTensors

VOCAB_SIZE, CONTEXT_LEN = 100, 64
LONGEST_ANSWER = 16
WAIT_S = 300.0
"""Seconds for one operation; beside a hostile client it may wait for many others."""


class Honest:
    """`Honest` owns one session and posts `num_operations` operations to it."""

    def __init__(
        self, client: ServiceClient, name: str, output_dir: Path, seed: int, num_operations: int
    ) -> None:
        self.name, self.num_operations = name, num_operations
        self.results: list[str] = []
        """What came of each operation: its kind, its arguments' digest, and a digest of the result."""
        self._client, self._output_dir = client, output_dir
        self._random = random.Random(f"{seed}/{name}")
        self._answers: list[Sample] = []
        self._saved: int | None = None
        self._has_gradients = False

    def run(self) -> None:
        """Carry out all operations. Raises what the service should not have raised."""
        rank, lr = self._random.choice([2, 4, 8]), self._random.choice([1e-3, 3e-3])
        session = self._client.create_session(
            self.name,
            output_dir=self._output_dir,
            lora={"rank": rank, "alpha": 2 * rank, "experts": "per_expert"},
            optimizer={"lr": lr},
            train={"micro_batch_tokens": 512},
            seed=self._random.randrange(1000),
        )
        while len(self.results) < self.num_operations:
            self._step(session)
        folder = session.save().result(WAIT_S).folder
        self.results.append(f"final {digest_of_checkpoint(folder)}")

    def _step(self, session: Session) -> None:
        kinds = {
            self._sample: 5,
            self._train: 5,
            self._forward: 2,
            self._save: 1,
            self._restart: 0.3,
        }
        if self._saved is not None:
            kinds[self._load] = 0.5
        (kind,) = self._random.choices(list(kinds), list(kinds.values()))
        kind(session)

    def _sample(self, session: Session) -> None:
        chance = self._random
        prompts = [
            self._tokens(1, CONTEXT_LEN - LONGEST_ANSWER - 8) for _ in range(chance.randint(1, 3))
        ]
        options: dict[str, Any] = {"seed": chance.randrange(1 << 20)}
        options["temperature"] = chance.choice([1.0, 1.0, 0.0, 0.7, 1.3])
        options["top_p"] = chance.choice([1.0, 1.0, 0.9, 0.01])
        options["top_k"] = chance.choice([-1, -1, 1, 5, VOCAB_SIZE])
        answer = chance.randint(1, LONGEST_ANSWER)
        if chance.random() < 0.3:
            options["min_tokens"] = chance.randint(0, answer)
        if chance.random() < 0.3:
            options["stop_token_ids"] = self._tokens(1, 3)
        asked = session.sample(prompts, n=chance.randint(1, 4), max_tokens=answer, **options)
        groups = self._result("sample", asked)
        assert groups is not None, self.results[-1]
        self._answers = [answer for group in groups for answer in group]

    def _train(self, session: Session) -> None:
        """Post one to three backward passes and a step, and wait for them together."""
        chance = self._random
        passed = [self._pass(session) for _ in range(chance.randint(1, 3))]
        step = session.optim_step(chance.choice([None, None, 1e-3]))
        for each in passed:
            assert self._result("forward_backward", each) is not None, self.results[-1]
        assert self._result("optim_step", step) is not None, self.results[-1]

    def _pass(self, session: Session) -> Future[Any]:
        chance = self._random
        loss = chance.choice(["cross_entropy", "importance_sampling", "ppo", "cispo"])
        if loss == "cross_entropy" or not self._answers:
            data = [
                Datum(self._tokens(2, CONTEXT_LEN), weight=0.1) for _ in range(chance.randint(1, 4))
            ]
            return session.forward_backward(data)
        advantages = [chance.choice([-1.0, 0.5, 2.0]) for _ in self._answers]
        pairs = zip(self._answers, advantages, strict=True)
        return session.forward_backward([a.datum(value, 1 / 16) for a, value in pairs], loss)

    def _forward(self, session: Session) -> None:
        sequences = [self._tokens(2, CONTEXT_LEN) for _ in range(self._random.randint(1, 4))]
        assert self._result("forward", session.forward(sequences)) is not None, self.results[-1]

    def _save(self, session: Session) -> None:
        saved = self._result("save", session.save(), lambda saved: saved.version)
        assert saved is not None, self.results[-1]
        self._saved = saved.version

    def _load(self, session: Session) -> None:
        assert self._saved is not None
        assert self._result("load", session.load(self._saved)) is not None, self.results[-1]

    def _restart(self, session: Session) -> None:
        """Pause and resume: the session is saved, and begins a new life."""
        session.pause()
        session.resume()
        self._answers = []  # their routes are gone
        self._saved = None  # the pause may have made another newest checkpoint
        self.results.append(f"restart version {session.wait_open(WAIT_S)}")

    def _result(
        self, kind: str, future: Future[Any], shown: Callable[[Any], Any] = lambda found: found
    ) -> Any:
        """Wait, and note what came of it; None where it failed."""
        try:
            found = future.result(WAIT_S)
        except OperationFailed as error:
            self.results.append(f"{kind} failed: {error}")
            return None
        self.results.append(f"{kind} {digest_of(shown(found))}")
        return found

    def _tokens(self, least: int, most: int) -> list[int]:
        return [
            self._random.randrange(4, VOCAB_SIZE) for _ in range(self._random.randint(least, most))
        ]


def digest_of(found: Any) -> str:
    """Return a digest of a result's numbers, exactly; without ids, which differ between services."""
    return hashlib.sha256(json.dumps(_plain(found)).encode()).hexdigest()[:16]


def _plain(found: Any) -> Any:
    if isinstance(found, Sample):
        return [
            _plain(each)
            for each in (found.tokens, found.logprobs, found.version, found.stop_reason)
        ]
    if isinstance(found, np.ndarray):
        return [found.dtype.str, found.tobytes().hex()]
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in sorted(found.items()) if "time" not in key}
    if isinstance(found, (list, tuple)):
        return [_plain(each) for each in found]
    return found


def digest_of_checkpoint(folder: Path) -> str:
    """Return a digest of the tensors of a checkpoint: adapter and optimizer state."""
    saved, digest = SavedTensors(folder), hashlib.sha256()
    for name in sorted(name for name in saved if not name.startswith("random.")):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(saved[name].float().numpy()).tobytes())
    return digest.hexdigest()[:16]
