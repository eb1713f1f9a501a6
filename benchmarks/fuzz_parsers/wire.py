"""This module has the parsers of what comes over a socket: engine answers and rewards."""

from __future__ import annotations

import base64
import json
import math
import queue
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fuzz_parsers.base import Parser, require
from mrl.engines.base import Request, SamplingParams
from mrl.engines.sglang.decode import Expected, RouteShape, decode_completion
from mrl.engines.sglang.route_memory import RouteReader
from mrl.errors import InputError
from mrl.rewards.base import RewardError, total_of
from mrl.rewards.remote import HttpReward
from mrl.rewards.server import RewardServer
from mrl.rewards.worker import call_reward

ROUTES = np.tile(np.array([0, 1, 2, 3], "<i4"), 4)
"""4 rows x 2 layers x top-2."""
ANSWER = {
    "output_ids": [5, 6, 7],
    "meta_info": {
        "finish_reason": {"type": "stop"}, "completion_tokens": 3, "prompt_tokens": 2,
        "cached_tokens": 0, "weight_version": "1", "num_retractions": 0,
        "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None], [-1.0, 7, None]],
        "routed_experts": base64.b64encode(ROUTES.tobytes()).decode(),
    },
}  # fmt: skip
CALL: dict[str, Any] = {"prompts": ["a", "b"], "completions": ["c", "d"], "columns": {"n": [1, 2]}}
EXPECTED = Expected((1,), (1,), RouteShape(2, (1, 2), 4, 2), retracted=False, routes=RouteReader())
REQUEST = Request("r", torch.tensor([1, 2]), 0, SamplingParams(8))


def _answer(data: bytes, folder: Path) -> None:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return  # the client of the engine refuses it before
    found = decode_completion(answer, REQUEST, EXPECTED)
    require(len(found.logprobs) == len(found.output_ids), "other lengths")
    require(bool(torch.isfinite(found.logprobs).all()), f"log-probs {found.logprobs.tolist()}")
    require(bool((found.output_ids >= 0).all()), f"tokens {found.output_ids.tolist()}")


class Lane:
    """Stands in for a worker, which would take milliseconds, and looks at what it would get."""

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        size = len(request["completions"])
        columns = [request["prompts"], *request["columns"].values()]
        require(all(len(values) == size for values in columns), "columns of other lengths")
        json.dumps(request).encode()  # as it is written to a worker
        return {"rewards": [0.0] * size}


def _reward_request(data: bytes, folder: Path) -> None:
    server = object.__new__(RewardServer)  # without a port
    server._free, server._num_workers, server._timeout_s = queue.SimpleQueue(), 1, 1.0
    server._free.put(Lane())  # type: ignore[arg-type]
    status, message = server.answer(data)
    require((status == 200) == ("rewards" in message), f"status {status} with {message}")
    require(status in (200, 400), f"status {status}")


def _reward_answer(data: bytes, folder: Path) -> None:
    client = HttpReward("http://127.0.0.1:9", 1.0)  # never connected
    for entry in call_reward(lambda prompts, completions, **_: client._rewards(200, data), CALL):
        total = total_of(entry)
        require(total is None or math.isfinite(total), f"a reward of {total}")


PARSERS = (
    Parser("engine answer", (json.dumps(ANSWER).encode(),), _answer, (RuntimeError,)),
    Parser("reward request", (json.dumps(CALL).encode(),), _reward_request, ()),
    Parser("reward answer", (b'{"rewards": [0.5, null]}', b'{"rewards": [1, {"total": 1.0}]}'),
           _reward_answer, (RewardError, InputError)),
)  # fmt: skip
