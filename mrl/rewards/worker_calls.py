"""Starts the process that runs a reward function (`mrl.rewards.worker`), and calls it."""

from __future__ import annotations

import time
from typing import Any

from mrl.rewards.base import HANG, RewardError
from mrl.rewards.resolve import REWARD_MODEL
from mrl.system.json_worker import START_TIMEOUT_S, JsonWorker, WorkerLost
from mrl.system.worker_user import WorkerUser

MODEL_START_TIMEOUT_S = 1800.0
"""The time limit for reading a reward model."""


def reward_worker(spec: str, timeout_s: float, user: WorkerUser | None = None) -> JsonWorker:
    """Return the process that calls the function, not yet started; `user`: None is that of this one."""
    is_model = spec.startswith(REWARD_MODEL)
    return JsonWorker(
        "mrl.rewards.worker",
        f"reward {spec!r}",
        spec,
        repr(timeout_s),
        start_timeout_s=MODEL_START_TIMEOUT_S if is_model else START_TIMEOUT_S,
        user=user,
    )


def call_worker(worker: JsonWorker, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return the worker's answer to `request`, as `mrl.rewards.worker` describes it.

    Where the worker hung or died it is gone afterwards, and the answer says so.
    """
    start = time.monotonic()
    try:
        return worker.call(request, timeout_s)
    except WorkerLost as error:
        kind = HANG if time.monotonic() - start >= timeout_s else RewardError.kind
        return {"error": str(error), "broken": False, "kind": kind}
