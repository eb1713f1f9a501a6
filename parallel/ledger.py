"""The ledger says where the trainer's bytes are, by kind: on the device, the host, or nowhere.

The trainer and the rollout engine share the devices, so what the trainer does not need leaves:
gradients and optimizer state before the weight sync, parameters after it.

Bytes belong to storages, not to tensors: Megatron's DDP keeps all gradients as views of one buffer,
its distributed optimizer all parameters too, and for fp32 models the optimizer's main parameters are
views of that same buffer. Each storage has one owner, the first kind that names it, and moves with
that kind only.

Storages are emptied and filled in place. Assigning to `parameter.data` would move the bytes too, but
across devices it also replaces the parameter's gradient accumulator, on which Megatron's DDP hangs its
hooks: training would continue with gradients of zero, silently.

Host buffers are kept and used again, by size: pinning memory takes longer than the copy into it. They
stay allocated while their contents are on the device; `host_buffer_bytes` counts them all. A storage
that never changes, such as a frozen weight, keeps its own: it is copied to the host once.

Memory of kinds that leave stays with torch's allocator, and the next tensors of this process get it:
they come after the copies, on the same stream. Only `give_back` returns it to the driver, for another
process of the device.

The copies to and from pinned memory have not run on a GPU yet; that nothing is lost or unhooked is
tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from mrl.types import Max, Statistics

Place = Literal["device", "host", "freed"]


class Bytes(NamedTuple):
    """How many bytes of one kind are where, on this rank."""

    device: int
    host: int
    freed: int
    """Given back without a copy: their contents are nothing until they return, as zeros."""


@dataclass
class _Owner:
    tensors: Callable[[], Iterable[Tensor]]
    """Asked each time: Adam makes its moments in the first step."""
    disposable: bool
    stays_on_host: bool
    keeps_frozen: bool
    place: Place = "device"
    away: list[tuple[UntypedStorage, int, Tensor | None]] = field(default_factory=list)
    """Emptied storages: (storage, bytes, host copy or None where freed)."""
    copies: dict[int, tuple[UntypedStorage, Tensor]] = field(default_factory=dict)
    """The host copies of frozen storages, wherever these are, by `_cdata`."""


class Ledger:
    """A `Ledger` knows the storages of one rank by kind. A kind is moved as a whole."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.type
        self._pinned = device.type == "cuda"
        self._owners: dict[str, _Owner] = {}
        self._spare: dict[int, list[Tensor]] = {}
        self._host_buffer_bytes = 0

    def own(
        self,
        kind: str,
        tensors: Callable[[], Iterable[Tensor]],
        *,
        disposable: bool = False,
        on_host: bool = False,
        keeps_frozen: bool = False,
    ) -> None:
        """Enter a kind. Storages that an earlier kind names stay with that one.

        `disposable`: the contents are nothing between steps, so the kind may be freed. `on_host`: the
        tensors live on the host for good and never move. `keeps_frozen`: weights that are not trained
        have their values for good when the kind first moves; their host copies are kept.
        """
        assert kind not in self._owners, f"the ledger has {kind!r} already"
        place: Place = "host" if on_host else "device"
        self._owners[kind] = _Owner(tensors, disposable, on_host, keeps_frozen, place)

    def place(self, kind: str) -> Place:
        return self._owners[kind].place

    def is_disposable(self, kind: str) -> bool:
        """Whether the contents of a kind are nothing between steps."""
        return self._owners[kind].disposable

    def require_on_device(self, *kinds: str) -> None:
        """Raise RuntimeError where one of `kinds` is away: its tensors have no bytes now."""
        away = {kind: self.place(kind) for kind in kinds if self.place(kind) != "device"}
        if away:
            raise RuntimeError(f"memory ledger: expected {kinds} on the device, got {away}")

    def to_host(self, kind: str) -> int:
        """Copy a kind to the host and free its device memory for this process; return the number of
        bytes that were copied. Raises RuntimeError where it is not on the device."""
        owner, num_copied = self._expect(kind, "to_host", ("device",)), 0
        storages = self._on_device()[kind]
        changing = {t.untyped_storage()._cdata for t in owner.tensors() if not _is_frozen(t)}
        for storage in storages:
            if storage._cdata in owner.copies:
                _, host = owner.copies[storage._cdata]
            else:
                host = self._host_buffer(storage.nbytes())
                host.untyped_storage().copy_(storage, non_blocking=self._pinned)
                num_copied += storage.nbytes()
                if owner.keeps_frozen and storage._cdata not in changing:
                    owner.copies[storage._cdata] = (storage, host)
            owner.away.append((storage, storage.nbytes(), host))
        for storage in storages:
            storage.resize_(0)
        owner.place = "host"
        return num_copied

    def free(self, kind: str) -> None:
        """Free the memory of a disposable kind without a copy; raises RuntimeError for others."""
        owner = self._expect(kind, "free", ("device",))
        if not owner.disposable:
            raise RuntimeError(
                f"memory ledger: free({kind!r}) would lose its contents; use to_host"
            )
        storages = self._on_device()[kind]
        owner.away += [(storage, storage.nbytes(), None) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        owner.place = "freed"

    def put_away(self, *kinds: str) -> int:
        """Free or copy to the host those of `kinds` that are on the device; return the number of bytes
        that were copied."""
        num_copied = 0
        for kind in [kind for kind in kinds if self.place(kind) == "device"]:
            if self.is_disposable(kind):
                self.free(kind)
            else:
                num_copied += self.to_host(kind)
        return num_copied

    def to_device(self, kind: str) -> int:
        """Bring a kind back: the bytes that left, zeros if freed. Return the number of bytes that were
        copied. Raises RuntimeError where the kind is not away."""
        owner = self._expect(kind, "to_device", ("host", "freed"))
        num_copied = sum(num_bytes for _, num_bytes, host in owner.away if host is not None)
        for storage, num_bytes, host in owner.away:
            storage.resize_(num_bytes)
            if host is None:
                freed: Any = storage  # torch's stubs lack fill_
                freed.fill_(0)
            else:
                storage.copy_(host.untyped_storage(), non_blocking=self._pinned)
                # A later copy into this buffer is queued behind this one on the same stream.
                if storage._cdata not in owner.copies:
                    self._spare.setdefault(num_bytes, []).append(host)
        owner.away.clear()
        owner.place = "device"
        return num_copied

    def give_back(self) -> None:
        """Return all free memory of the device to the driver, once the copies to the host are done: for
        an engine that shares the device. Once for all kinds of a move, because it waits."""
        if self._pinned:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def drop(self, kind: str) -> None:
        """Forget a kind and free all its memory, wherever it is: its tensors have no bytes afterwards.

        The host buffers that it was moved into go, too. One that was never entered is ignored.
        """
        if kind not in self._owners:
            return
        storages = self._storages()[kind]
        owner = self._owners.pop(kind)
        for storage in storages:
            if storage._cdata in owner.copies:
                self._host_buffer_bytes -= storage.nbytes()
            elif (spare := self._spare.get(storage.nbytes())) and not owner.stays_on_host:
                spare.pop()
                self._host_buffer_bytes -= storage.nbytes()
            if storage.resizable():
                storage.resize_(0)
        self._host_buffer_bytes -= sum(n for _, n, host in owner.away if host is not None)

    def where(self) -> dict[str, Bytes]:
        """Every byte of this rank by kind; nothing is counted twice."""
        counts = {}
        for kind, storages in self._storages().items():
            owner = self._owners[kind]
            moves = [self._device_bytes(storage) for storage in storages]
            here = 0 if owner.stays_on_host else sum(moves)
            away = [(num_bytes, copy is not None) for _, num_bytes, copy in owner.away]
            copied = sum(num_bytes for num_bytes, has_copy in away if has_copy)
            stays = sum(storage.nbytes() for storage in storages) - here
            freed = sum(num_bytes for num_bytes, has_copy in away if not has_copy)
            counts[kind] = Bytes(here, stays + copied, freed)
        return counts

    @property
    def host_buffer_bytes(self) -> int:
        """Host memory that the ledger holds to move things into, in use or not."""
        return self._host_buffer_bytes

    def _expect(self, kind: str, move: str, places: tuple[Place, ...]) -> _Owner:
        owner = self._owners[kind]
        if owner.stays_on_host:
            raise RuntimeError(f"memory ledger: {move}({kind!r}): it stays on the host")
        if owner.place not in places:
            raise RuntimeError(
                f"memory ledger: {move}({kind!r}): its state is {owner.place}, expected "
                f"{' or '.join(places)}"
            )
        return owner

    def _storages(self, *, with_away: bool = True) -> dict[str, list[UntypedStorage]]:
        """Return the storages that hold bytes now, by kind; each with the first kind that names it.

        `with_away`: ask also kinds that are away, of which Adam's step counts may still be here.
        """
        taken = {s._cdata for owner in self._owners.values() for s, _, _ in owner.away}
        found: dict[str, list[UntypedStorage]] = {}
        for kind, owner in self._owners.items():
            mine = found[kind] = []
            if owner.place != "device" and not with_away:
                continue  # many policies may be away
            for tensor in owner.tensors():
                storage = tensor.untyped_storage()
                if storage._cdata not in taken and storage.nbytes():
                    taken.add(storage._cdata)
                    mine.append(storage)
        return found

    def _device_bytes(self, storage: UntypedStorage) -> int:
        return storage.nbytes() if storage.device.type == self._device else 0

    def _on_device(self) -> dict[str, list[UntypedStorage]]:
        """Return the storages on the device: not what stays on the CPU of a GPU machine, such as Adam's
        step counts."""
        return {
            kind: [s for s in storages if self._device_bytes(s)]
            for kind, storages in self._storages(with_away=False).items()
        }

    def _host_buffer(self, num_bytes: int) -> Tensor:
        spare = self._spare.get(num_bytes)
        if spare:
            return spare.pop()
        self._host_buffer_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)


def gradient_tensors(chunks: list[Any]) -> Iterator[Tensor]:
    """The buffers that Megatron's DDP reduces gradients in."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def parameter_tensors(chunks: list[Any]) -> Iterator[Tensor]:
    """Weights and registered buffers (expert biases) of the chunks."""
    for chunk in chunks:
        yield from chunk.parameters()
        for _, buffer in chunk.named_buffers():  # DDP's own `buffers` are its gradient buffers
            yield buffer


def _is_frozen(tensor: Tensor) -> bool:
    """Whether this is a weight that is not trained; buffers, which may change, are none."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Main parameters and moments; for an fp32 model the main parameters are the weights themselves.

    What a HybridDeviceOptimizer keeps on the host is among them, gradients included: it stays there.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        outer = part.optimizer
        if outer is None:  # nothing of this kind, dense or experts, is trained on this rank
            continue
        for inner in (outer, *getattr(outer, "sub_optimizers", ())):
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                for value in filter(torch.is_tensor, state.values()):
                    yield getattr(value, "_data", value)  # the bytes of TransformerEngine's fp8
        yield from getattr(outer, "cpu_copy_map_grad", {}).values()


def memory_statistics(phase: str, where: Mapping[str, Bytes]) -> Statistics:
    """Return `memory/PHASE/KIND_device_bytes` and `_host_bytes`: the largest over the ranks."""
    return {
        f"memory/{phase}/{kind}_{place}_bytes": Max(torch.tensor(float(getattr(count, place))))
        for kind, count in where.items()
        for place in ("device", "host")
    }


def device_memory(device: torch.device) -> Statistics:
    """Return the GPU memory in use and its peak since the last call; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/allocated_bytes": Max(torch.tensor(float(torch.cuda.memory_allocated(device)))),
        "memory/peak_bytes": Max(torch.tensor(float(peak))),
    }
