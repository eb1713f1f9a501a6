"""Weight transports by name. `rollout.weight_sync: NAME` means NAME.py in this folder.

To add a transport, write a file here. For engines on separate ranks, the file defines

    Sender      (address, timeout_s, device) -> `WeightSender`
    Receiver    (address, name, timeout_s, device) -> `WeightReceiver`

`address` is the address of a torch store on the trainer's rank 0, `name` the worker's name in
`WeightSender.send`, and `device` the device that holds this side's buckets. A transport with
`sends_deltas = True` supports `rollout.weight_encoding: delta` (`mrl.weight_sync.delta`); its `Sender`
then gets a fourth argument, the largest number of versions in a row that may be sent as deltas.

By default, a `TensorPush` passes the buckets to SGLang, and the engine opens handles to their memory. A
transport that passes the buckets to SGLang in another way also defines

    Push            a `mrl.engines.sglang.weights.base.MakePush`
    opens_handles   False if the engine opens no handles to the buckets
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mrl.engines.sglang.weights.base import MakePush
from mrl.engines.sglang.weights.tensor import TensorPush
from mrl.errors import InputError
from mrl.system.plugins import Kind, resolve_builtin
from mrl.types import WeightBucket
from mrl.weight_sync.base import WeightReceiver, WeightSender
from mrl.weight_sync.engine_group import EngineGroup, GatheredBuckets
from parallel.mesh import local_device

_KIND = Kind("rollout.weight_sync", "mrl.weight_sync.transports", frozenset({"__init__"}))


def check_transport(name: str, *, is_disaggregated: bool, sends_deltas: bool = False) -> None:
    """Raise InputError if there is no such transport, if it has no `Sender` for a disaggregated run, or
    if it cannot send deltas and `sends_deltas` demands them."""
    transport = _load(name)
    if is_disaggregated and not hasattr(transport, "Sender"):
        raise InputError(
            f"rollout.weight_sync is {name}, which is for engines on the trainer's devices only; in a "
            "disaggregated run leave it at tensor"
        )
    if sends_deltas and not getattr(transport, "sends_deltas", False):
        raise InputError(
            f"rollout.weight_encoding is delta, but the transport rollout.weight_sync={name} sends "
            "every version whole; set rollout.weight_sync=tensor, or leave weight_encoding at full"
        )


def local_buckets(
    name: str, buckets: Iterator[WeightBucket], group: EngineGroup, *, sends_adapter: bool
) -> GatheredBuckets:
    """Return the buckets of an export for an engine on the devices of `group`. If the buckets
    contain an adapter, the engine reads them only from the memory of the group's rank 0, and other
    ranks make no handles."""
    # An engine of one rank makes the handles itself.
    has_handles = group.size > 1 and not sends_adapter and opens_handles(name)
    return GatheredBuckets(buckets, group.exchange, has_handles=has_handles)


def push_of(name: str) -> MakePush:
    """Return the class or function with which a transport makes its `WeightPush`, the object that
    transfers buckets to an SGLang server."""
    return getattr(_load(name), "Push", TensorPush)


def opens_handles(name: str) -> bool:
    """Return whether an engine on the trainer's devices opens handles to the trainer's buckets."""
    return getattr(_load(name), "opens_handles", True)


def make_sender(
    name: str,
    address: tuple[str, int],
    timeout_s: float,
    device: torch.device,
    max_deltas: int = 0,
) -> WeightSender:
    """Return the sending side of the transport `name`, for a trainer rank. `max_deltas` is the largest
    number of versions in a row that it may send as deltas."""
    deltas = (max_deltas,) if max_deltas else ()
    return _load(name).Sender(address, timeout_s, device, *deltas)


def make_receiver(
    name: str, address: tuple[str, int], worker: str, timeout_s: float, device: torch.device
) -> WeightReceiver:
    """Return the receiving side of the transport `name`, for the worker called `worker`."""
    return _load(name).Receiver(address, worker, timeout_s, device)


def transfer_device(*, sends_adapter: bool) -> torch.device:
    """Return the device that holds the buckets on this rank's side of a transport.

    An adapter is small, and reaches the engine through host memory in any case. Sending it from CPU to
    CPU avoids an NCCL communicator for each pair of a tenant and a worker.
    """
    return torch.device("cpu") if sends_adapter else local_device()


def _load(name: str) -> Any:
    """Import a file of this folder, and never other code, because tenants of a service choose the
    name."""
    return resolve_builtin(_KIND, name, "add a file there")
