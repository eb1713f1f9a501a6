"""Starts and calls the process that runs a reward function (`mrl.rewards.worker`)."""

from __future__ import annotations

import time
from typing import Any

from mrl.rewards.base import HANG, RewardError
from mrl.rewards.resolve import REWARD_MODEL
from mrl.system.json_worker import JsonWorker
from mrl.system.worker_process import START_TIMEOUT_S, WorkerLost
from mrl.system.worker_user import WorkerUser

MODEL_START_TIMEOUT_S = 1800.0
"""Time limit for loading a reward model."""


def reward_worker(spec: str, timeout_s: float, user: WorkerUser | None = None) -> JsonWorker:
    """Return a worker for the reward function `spec`, without starting the worker.

    The worker runs as `user`, or as this process's user if `user` is None. `timeout_s` is the time
    limit of one call to a reward server.
    """
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
    """Return the worker's answer to `request`, as described in `mrl.rewards.worker`.

    If the worker hangs or dies, the answer is an error, and the next call starts a new process.
    """
    start = time.monotonic()
    try:
        return worker.call(request, timeout_s)
    except WorkerLost as error:
        kind = HANG if time.monotonic() - start >= timeout_s else RewardError.kind
        return {"error": str(error), "broken": False, "kind": kind}
