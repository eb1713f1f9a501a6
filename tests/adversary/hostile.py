"""A hostile client of a session: what it asks for is at, or beyond, every limit that there is.

It has a session of its own, whose operations follow from a seed; it also sends what is no HTTP. Any
answer is right but silence: each operation must end as done, failed, lost or refused.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mrl.client import ServiceClient
from mrl.errors import InputError, RunFailed
from mrl.service.client import NobodyListens
from mrl.web.unix_socket import connect_unix
from tests.adversary.honest import CONTEXT_LEN
from tests.tenants import malformed

MODEL_VOCAB = 128
HUGE = (1 << 31, (1 << 53) - 1, 1 << 63, 1 << 80, -(1 << 63))
LARGE_FLOATS = (3.4e38, -3.4e38, 1e30, 1e-45, 5e-324, 1e300, 0.0, -0.0, -1.0)
WAIT_S = 300.0
OVER = ("done", "failed", "lost")


class Hostile:
    """`Hostile` sends `num_operations` operations and counts what they came to."""

    def __init__(
        self, client: ServiceClient, name: str, service: Path, seed: int, num_operations: int
    ) -> None:
        self.name, self.num_operations = name, num_operations
        self.came_to: Counter[str] = Counter()
        """Operations by what they came to: done, failed, lost, refused, sent (what is no HTTP)."""
        self.silent: list[dict[str, Any]] = []
        """Operations that got no answer in time."""
        self.problems: list[str] = []
        """Answers that a client should not get: an error of the service's own."""
        self._control, self._service = client.control, service
        self._random = random.Random(f"{seed}/{name}")
        self._raw = iter(malformed.cases(self._random))
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._number = 0

    def run(self) -> None:
        """Send everything, and wait for what was taken. Raises NobodyListens where the service ends."""
        while sum(self.came_to.values()) + len(self._waiting) < self.num_operations:
            if self._random.random() < 0.1:
                self._send_raw()
            elif self._random.random() < 0.08:
                self._change_tenant()
            else:
                self._post(operation(self._random))
            if len(self._waiting) > self._random.randint(0, 40):
                self._settle()
        self._settle()

    def _post(self, body: dict[str, Any]) -> None:
        try:
            posted = self._control.post(self.name, body)
        except NobodyListens:
            raise
        except InputError:
            self.came_to["refused"] += 1
            return
        except RunFailed as error:
            self.problems.append(f"{error} for {_short(body)}")
            self.came_to["refused"] += 1
            return
        self._waiting.append((posted["id"], body))

    def _settle(self) -> None:
        """Wait until all operations that were taken are over, or their session is gone."""
        end = time.monotonic() + WAIT_S
        for operation, body in self._waiting:
            while True:
                try:
                    state = self._control.operation(self.name, operation)["state"]
                except NobodyListens:
                    raise
                except InputError:
                    state = "lost"  # with its session, or among too many answers
                if state in OVER:
                    self.came_to[state] += 1
                    break
                if time.monotonic() > end:
                    self.silent.append(body)
                    self.came_to["silent"] += 1
                    break
                time.sleep(0.02)
        self._waiting.clear()

    def _change_tenant(self) -> None:
        """Pause, resume, remove or create the session, one or two at once."""
        for _ in range(self._random.randint(1, 3)):
            change = self._random.choice(["pause", "resume", "remove", "create", "create"])
            with contextlib.suppress(InputError):
                if change == "create":
                    self.create()
                else:
                    getattr(self._control, change)(self.name)
            self.came_to["sent"] += 1

    def create(self) -> None:
        """Make the session, with a new run folder each time."""
        self._number += 1
        rank = self._random.choice([1, 4, 8])
        recipe = {
            "lora": {"rank": rank, "alpha": 8, "experts": "per_expert"},
            "output_dir": str(self._service / f"runs/{self.name}_{self._number}"),
        }
        self._control.add(self.name, recipe, self._random.choice([1e-3, 1.0, 1e3]), loop="client")

    def _send_raw(self) -> None:
        """Send what is no request, and read what comes for a moment."""
        case = next(self._raw)
        with contextlib.suppress(OSError), connect_unix(self._service, 0.5) as connection:
            for part in case.parts:
                connection.sendall(part)
                time.sleep(case.pause_s / 10)
            if case.half_closes:
                connection.shutdown(socket.SHUT_WR)
            connection.recv(4096)
        self.came_to["sent"] += 1


def operation(chance: random.Random) -> dict[str, Any]:
    """Return the body of one operation; most are at a limit, or beyond one."""
    kind = chance.choices(
        ["sample", "train", "forward", "optim_step", "save", "load", "malformed"],
        [8, 3, 2, 2, 1, 1, 2],
    )[0]
    if kind == "malformed":
        return dict(chance.choice(malformed.OPERATIONS))
    if kind == "optim_step":
        return {"kind": kind, "lr": chance.choice([None, 1e3, 1e-45, 1e-3, *LARGE_FLOATS])}
    if kind == "save":
        return {"kind": kind}
    if kind == "load":
        return {"kind": kind, "version": chance.choice([0, 1, 5, (1 << 31) - 1, *HUGE])}
    if kind == "forward":
        return {"kind": kind, "sequences": [{"tokens": _tokens(chance)} for _ in range(3)]}
    return _sample(chance) if kind == "sample" else _train(chance)


def _sample(chance: random.Random) -> dict[str, Any]:
    """Every length around the context's end, and one or two options at or beyond their limits."""
    prompt = _tokens(chance)
    left = CONTEXT_LEN - len(prompt)
    body: dict[str, Any] = {
        "kind": "sample",
        "prompts": [prompt] * chance.choice([1, 1, 2, 5]),
        "max_tokens": max(1, chance.choice([1, left - 1, left, left + 1, left - 7, 3])),
    }
    options = {
        "n": lambda: chance.choice([1, 2, 64, 0, 4097, *HUGE]),
        "temperature": lambda: chance.choice([0.5, *LARGE_FLOATS]),
        "top_p": lambda: chance.choice([0.5, 1.0000001, *LARGE_FLOATS]),
        "top_k": lambda: chance.choice([1, 0, -2, MODEL_VOCAB, MODEL_VOCAB + 1, 1 << 30, *HUGE]),
        "min_tokens": lambda: chance.choice([1, body["max_tokens"], body["max_tokens"] + 1, *HUGE]),
        "stop_token_ids": lambda: [
            chance.choice([0, 1, MODEL_VOCAB - 1, MODEL_VOCAB, 200_000, (1 << 31) - 1])
            for _ in range(chance.choice([1, 3, 1000]))
        ],
        "stop": lambda: [
            chance.choice(["a", "\0", "\ud800", "é" * 999, " ", "\U0001f600", "<|eos|>"])
            for _ in range(chance.choice([1, 2, 32, 33]))
        ],
        "seed": lambda: chance.choice([0, -1, *HUGE]),
    }
    for name in chance.sample(sorted(options), chance.choice([0, 1, 1, 2, 3])):
        body[name] = options[name]()
    return body


def _train(chance: random.Random) -> dict[str, Any]:
    sequences = []
    for _ in range(chance.choice([1, 1, 3])):
        tokens = _tokens(chance)
        each: dict[str, Any] = {"tokens": tokens, "weight": chance.choice([1.0, *LARGE_FLOATS])}
        for name in ("advantages", "logprobs", "weights"):
            if chance.random() < 0.6:
                length = max(0, len(tokens) + chance.choice([0, 0, 0, 1, -1]))
                each[name] = [
                    0.0,
                    *(chance.choice([1.0, -3.0, *LARGE_FLOATS]) for _ in range(length)),
                ]
                each[name] = each[name][:length]
        if chance.random() < 0.1:
            each["sample"] = chance.choice(["", "1-1", "../x", "9" * 50])
        sequences.append(each)
    loss = chance.choice(["cross_entropy", "importance_sampling", "ppo", "cispo", "sapo"])
    body: dict[str, Any] = {"kind": "forward_backward", "loss": loss, "sequences": sequences}
    for name in ("clip_low", "clip_high", "dual_clip"):
        if chance.random() < 0.2:
            body[name] = chance.choice([0.1, 1.0, 1.1, 3.0, *LARGE_FLOATS])
    return body


def _tokens(chance: random.Random) -> list[int]:
    """Ids of any length up to the context and beyond, now and then outside the vocabulary."""
    length = chance.choice([1, 2, 5, 30, *range(CONTEXT_LEN - 10, CONTEXT_LEN + 2)])
    tokens = [chance.randrange(MODEL_VOCAB) for _ in range(length)]
    if chance.random() < 0.05:
        tokens[-1] = chance.choice([MODEL_VOCAB, (1 << 31) - 1, *HUGE, -1])
    return tokens


def _short(body: dict[str, Any]) -> str:
    return str(body)[:300]
