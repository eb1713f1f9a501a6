"""One frozen base for several policies, each with an adapter of its own.

One policy is mounted at a time: its adapter, hooks and replays are in the base's layers, and it is on
the device. All others are on the host, and no layer knows of them, so none of them can change what the
mounted one computes. What is not in the layers is each policy's own: gradient buffers, optimizer and
schedule, and the settings that Megatron's schedules read. The random states are swapped.
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
"""The base in the ledger; the kinds of a policy are NAME/parameters, NAME/gradients, NAME/optimizer."""


@dataclass(frozen=True)
class SwapReport:
    """A swap takes one policy out of the base and puts another in, or does one of the two."""

    seconds: float
    num_bytes: int
    """Copied between device and host, in both directions."""


class SharedBase(Base):
    """A `SharedBase` holds the frozen weights of a model on this rank, and the policy that is mounted.

    Policies are made over it with `Policy(..., base=this, name=NAME)`, and share its ledger. Where none
    is mounted, its layers are the plain ones. To mount and to take out is a collective.
    """

    kinds = (KIND,)

    def __init__(self, setup: BaseSetup, mesh: Mesh) -> None:
        """Build the chunks and load their weights.

        Raises ValueError where the setup is not that of an adapter's base.
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
        """The policies, with their random states as they were when they were taken out."""

    @property
    def names(self) -> list[str]:
        """The names of the policies, in the order in which they came."""
        return [policy.name for policy in self._random_of]

    def _tensors(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if not is_adapter(name):
                    yield parameter
            yield from chunk.buffers()

    def take(self, model: Any, seed: int) -> None:
        """Mount a policy that is being made, which puts its parts into the layers itself.

        Its random states follow from `seed`, and not from who came before it. Raises ValueError for a
        name that is empty, or that another policy has.
        """
        if not model.name or model.name in self.names:
            raise ValueError(
                f"policies over one base need names of their own: got {model.name!r}, there are "
                f"{self.names}"
            )
        self._take_out()
        self._random_of[model] = self._random
        self._let_in(model)
        reseed(seed, 0)

    def release(self, model: Any) -> bool:
        """Let go of a policy that is closed; return whether it was there. Its memory does not move: the
        policy frees it."""
        if self.mounted is model:
            model.attachments.detach()
            self.mounted = None
        return self._random_of.pop(model, None) is not None

    def mount(self, policy: Any, *, adapter_only: bool = False) -> SwapReport:
        """Put a policy into the layers, in the place of the one that is there, and bring it and the
        base to the device. `adapter_only`: the adapter alone comes, to be exported without the rest.

        What is there already stays, so a second call brings the rest. Raises RuntimeError for a policy
        that was closed.
        """
        if policy not in self._random_of:
            raise RuntimeError(f"policy {policy.name!r} is closed, there are {self.names}")
        start, num_bytes = time.perf_counter(), 0
        if self.mounted is not policy:
            num_bytes = self._take_out()
            policy.attachments.attach()
            self._let_in(policy)
        kinds = policy.own_kinds[:1] if adapter_only else (*self.kinds, *policy.own_kinds)
        for kind in kinds:
            if self.ledger.place(kind) != "device":
                num_bytes += self.ledger.to_device(kind)
        return self._report(start, num_bytes)

    def unmount(self) -> SwapReport:
        """Take the mounted policy, if any, out of the layers, and move all of it to the host."""
        start = time.perf_counter()
        return self._report(start, self._take_out())

    def offload(self) -> None:
        """Move the base to the host, for the engine. On a CPU nothing moves: there is one memory."""
        if self.mesh.device.type != "cpu":
            self.ledger.put_away(KIND)
        self.give_back()

    def give_back(self) -> None:
        """Give the memory of what has left to the engine; a swap alone keeps it for the next policy."""
        self.ledger.give_back()

    def onload(self) -> None:
        """Bring the base back where it is away."""
        if self.ledger.place(KIND) != "device":
            self.ledger.to_device(KIND)

    def close(self) -> None:
        """Free the memory of the base. Close its policies first."""
        assert not self._random_of, f"policies {self.names} are still there; close them first"
        self.ledger.drop(KIND)

    def _let_in(self, policy: Any) -> None:
        self.mounted = policy
        restore_random_state(self._random_of[policy], self.mesh.device)

    def _take_out(self) -> int:
        """Return the number of bytes that were copied to the host."""
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
