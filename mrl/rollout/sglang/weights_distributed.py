"""Weight buckets through SGLang's /update_weights_from_distributed: `rollout.weight_sync=distributed`.

The trainer is rank 0 of a group with the engine's ranks and broadcasts each bucket. The group stands
beside torch's default one, which knows nothing of it. Every socket listens on loopback only.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.rollout.base import EngineLost
from mrl.rollout.sglang.server import CONTROL_TIMEOUT_S
from mrl.rollout.sglang.weights import (
    Post,
    flatten_bucket,
    in_thread,
    version_fields,
)
from mrl.types import WeightBucket

LOOPBACK = "127.0.0.1"
POLL_S = 0.001
TIMEOUT = timedelta(seconds=CONTROL_TIMEOUT_S + 60)
"""Above a request's own limit: of an engine that hangs, the request is the one to tell."""
GRACE_S = 5.0
"""What a request has left to say why our part failed: a lost engine cuts our connection first."""


class DistributedPush:
    """The group is made for the first bucket, and anew after an error."""

    def __init__(self, post: Post, num_ranks: int) -> None:
        self._post = post
        self._num_ranks = num_ranks
        self._group: Any = None
        self._store: dist.TCPStore | None = None
        self._name = ""

    def push(self, bucket: WeightBucket) -> None:
        flat, places = flatten_bucket(bucket)
        if self._group is None:
            self._open(flat.device)
        body = {
            "names": [place.name for place in places],
            "dtypes": [str(place.dtype).removeprefix("torch.") for place in places],
            "shapes": [list(place.shape) for place in places],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            **version_fields(bucket),
        }
        try:
            self._beside(
                lambda: self._post("/update_weights_from_distributed", body),
                lambda: self._broadcast(flat),
            )
        except BaseException:
            self._forget()
            raise

    def finish(self) -> None:
        """push() has waited for the engine."""

    def settle(self) -> None:
        """Nothing is left of an update that succeeded."""

    def close(self) -> None:
        """The engine's ranks leave the group too, where they still can."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError, OSError):
                self._post("/destroy_weights_update_group", {"group_name": self._name})
        self._forget()

    def _forget(self) -> None:
        self._group = self._store = None

    def _open(self, device: torch.device) -> None:
        self._name = f"mrl-{uuid.uuid4().hex}"
        # torch's store would listen on every interface if it made the socket itself.
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        body = {
            "master_address": LOOPBACK,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self._num_ranks,
            "group_name": self._name,
            "backend": "nccl" if device.type == "cuda" else "gloo",
        }
        self._beside(
            lambda: self._post("/init_weights_update_group", body), lambda: self._join(device)
        )

    def _join(self, device: torch.device) -> None:
        """What SGLang's init_custom_process_group does on the other side, prefixes included."""
        assert self._store is not None
        store = dist.PrefixStore(self._name, self._store)
        store = dist.PrefixStore(f"{device.type}/", dist.PrefixStore(f"{self._name}/", store))
        size = 1 + self._num_ranks
        if device.type == "cuda":
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, 0, size, options)
            return
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        self._group = dist.ProcessGroupGloo(store, 0, size, options)

    def _broadcast(self, flat: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([flat], options)

    @staticmethod
    def _beside(request: Callable[[], Any], ours: Callable[[], Any]) -> None:
        """Our part of a collective while the server does its own.

        A request that fails leaves our part waiting for ranks that never come: it is given up.
        Raises EngineLost where the request does, and RuntimeError where either part fails.
        """
        answer, own = in_thread(request), in_thread(lambda: _wait(ours()))
        while not (own.done() or (answer.done() and answer.exception())):
            time.sleep(POLL_S)
        # A part of ours that failed may leave the server waiting too, until its own time limit.
        if own.done() and (error := own.exception()):
            with contextlib.suppress(TimeoutError):
                if isinstance(lost := answer.exception(timeout=GRACE_S), EngineLost):
                    raise lost
            raise RuntimeError(f"update_weights: the group with the engine failed: {error}")
        answer.result()


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
