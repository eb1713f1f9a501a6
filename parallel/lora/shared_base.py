"""One frozen base for several policies, each with its own adapter.

One policy is mounted at a time: its adapter, hooks and routing replays are attached to the base's
layers, and its memory is on the device. All other policies are on the host, and no layer refers to
them, so they cannot change what the mounted policy computes. Everything outside the layers belongs
to one policy: gradient buffers, optimizer, learning-rate schedule, and the settings that Megatron's
pipeline schedules read. Each policy also has its own random states, which are swapped with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.base import Base, BaseSetup
from parallel.checkpoint.random_state import pack_random_state, reseed, restore_random_state
from parallel.ledger import Ledger
from parallel.lora.rules import is_adapter
from parallel.mesh import Mesh
from parallel.weights import WeightMap

KIND = "base"
"""The kind of the base's weights in the memory ledger. A policy has the kinds NAME/parameters,
NAME/gradients and NAME/optimizer."""


@dataclass(frozen=True)
class SwapReport:
    """The cost of unmounting one policy and mounting another, or of only one of these two moves."""

    seconds: float
    num_bytes: int
    """The number of bytes copied from the device to the host and from the host to the device."""


class SharedBase(Base):
    """The frozen weights of a model on this rank, and the policy that is mounted on them.

    Policies are made with `Policy(..., base=this, name=NAME)`, and share the base's memory
    ledger (`parallel.ledger`). If no policy is mounted, the layers are Megatron's plain layers.
    Mounting and unmounting are collectives.
    """

    kinds = (KIND,)

    def __init__(self, setup: BaseSetup, mesh: Mesh) -> None:
        """Build the chunks and load their weights.

        Raises ValueError unless the setup is for an adapter and leaves the expert biases unchanged.
        """
        if not setup.is_adapted or setup.moe.expert_bias_update_rate:
            raise ValueError(f"a shared base is frozen, got {setup}; share that of an adapter")
        super().__init__(setup, mesh)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        WeightMap(setup.model, mesh, self.chunks).load()
        self.ledger = Ledger(mesh.device)
        self.ledger.own(KIND, self._tensors, keeps_frozen=True)
        self._random = pack_random_state(mesh.device)
        self._random_of: dict[Any, Tensor] = {}
        """The random states that each policy had when it was last unmounted. Every open policy has
        an entry."""

    @property
    def names(self) -> list[str]:
        """The names of the policies, in the order in which they were made."""
        return [policy.name for policy in self._random_of]

    def _tensors(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if not is_adapter(name):
                    yield parameter
            yield from chunk.buffers()

    def take(self, model: Any, seed: int) -> None:
        """Unmount the current policy, if any, and mount `model`. The model is still being built, and
        attaches its own adapter, hooks and replays.

        The random states of `model` depend only on `seed`, not on earlier policies. Raises
        ValueError if the model's name is empty, or if another policy has the same name.
        """
        if not model.name or model.name in self.names:
            raise ValueError(
                f"policies over one base need names of their own: got {model.name!r}, there are "
                f"{self.names}"
            )
        self._unmount()
        self._random_of[model] = self._random
        self._put_in(model)
        reseed(seed, 0)

    def release(self, model: Any) -> bool:
        """Release a policy that is being closed; return False if it was released before.

        The policy frees its memory itself.
        """
        if self.mounted is model:
            model.attachments.detach()
            self.mounted = None
        return self._random_of.pop(model, None) is not None

    def mount(self, policy: Any, *, adapter_only: bool = False) -> SwapReport:
        """Mount a policy in place of the current one, and move the policy and the base to the
        device. A policy that is mounted already is only moved.

        With `adapter_only` only the adapter's weights are moved, which is enough to export them; a
        later call moves the rest. Raises RuntimeError for a policy that was closed.
        """
        if policy not in self._random_of:
            raise RuntimeError(f"policy {policy.name!r} is closed, there are {self.names}")
        start, num_bytes = time.perf_counter(), 0
        if self.mounted is not policy:
            num_bytes = self._unmount()
            policy.attachments.attach()
            self._put_in(policy)
        kinds = policy.own_kinds[:1] if adapter_only else (*self.kinds, *policy.own_kinds)
        for kind in kinds:
            if self.ledger.place(kind) != "device":
                num_bytes += self.ledger.to_device(kind)
        return self._report(start, num_bytes)

    def unmount(self) -> SwapReport:
        """Unmount the current policy, if any. Its weights and optimizer state move to the host, and
        its gradients are freed."""
        start = time.perf_counter()
        return self._report(start, self._unmount())

    def offload(self) -> None:
        """Move the base to the host, to make room for the engine. On a CPU nothing moves."""
        if self.mesh.device.type != "cpu":
            self.ledger.put_away(KIND)
        self.give_back()

    def give_back(self) -> None:
        """Return freed device memory to the driver, for the engine.

        `mount` does not do this, because the next policy needs the memory.
        """
        self.ledger.give_back()

    def onload(self) -> None:
        """Move the base back to the device, if it is not already there."""
        if self.ledger.place(KIND) != "device":
            self.ledger.to_device(KIND)

    def close(self) -> None:
        """Free the memory of the base. Its policies must be closed first."""
        assert not self._random_of, f"policies {self.names} are still there; close them first"
        self.ledger.drop(KIND)

    def _put_in(self, policy: Any) -> None:
        self.mounted = policy
        restore_random_state(self._random_of[policy], self.mesh.device)

    def _unmount(self) -> int:
        """Unmount the current policy, if any; return the number of bytes copied to the host."""
        policy = self.mounted
        if policy is None:
            return 0
        self._random_of[policy] = pack_random_state(self.mesh.device)
        if self.ledger.place(policy.own_kinds[0]) == "device":
            policy.gather_parameters()
        policy.attachments.detach()
        self.mounted = None
        return self.ledger.put_away(*policy.own_kinds)

    def _report(self, start: float, num_bytes: int) -> SwapReport:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()  # the copies to the device are only queued
        return SwapReport(time.perf_counter() - start, num_bytes)
