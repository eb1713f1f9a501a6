"""Track the trainer's memory by kind (such as `parameters`, `gradients` or `optimizer`), and move a
kind between device and host, or free it.

The trainer and the rollout engine share the devices, so the trainer moves away what it does not
need: gradients and optimizer state before the weight sync, parameters after the sync.

Bytes belong to storages, not to tensors: Megatron's DDP keeps all gradients as views of one buffer,
its distributed optimizer does the same with all parameters, and for fp32 models the optimizer's
main parameters are views of that same buffer. Each storage has one owner, the first kind that names
it, and moves only with that kind.

Storages are emptied and filled in place. Assigning to `parameter.data` would move the bytes too,
but across devices it also replaces the parameter's gradient accumulator, to which Megatron's DDP
attaches its hooks: training would silently continue with gradients of zero.

Host buffers are kept and reused by size, because pinning memory takes longer than the copy into it.
They stay allocated even while the kind is on the device; `host_buffer_bytes` counts all of them. A
storage that never changes, such as a frozen weight, keeps its host buffer and is copied to it once.

When a kind moves away, torch's allocator keeps its device memory for the next tensors of this
process. The kernels that fill these tensors run after the copies to the host, because they use the
same stream. Only `give_back` returns the memory to the driver, for another process on the device.

The copies to and from pinned memory have not run on a GPU yet. Tests on a CPU show that no bytes
are lost and that hooks still run.
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
    """This rank's bytes of one kind (such as `parameters`): on the device, on the host, freed."""

    device: int
    host: int
    freed: int
    """Bytes that `Ledger.free` freed. Their contents are lost; `to_device` fills the storages with
    zeros."""


@dataclass
class _Owner:
    tensors: Callable[[], Iterable[Tensor]]
    """Returns the tensors of the kind. It is called each time, because Adam creates its moments in
    the first step."""
    disposable: bool
    stays_on_host: bool
    keeps_frozen: bool
    place: Place = "device"
    away: list[tuple[UntypedStorage, int, Tensor | None]] = field(default_factory=list)
    """Emptied storages: (storage, number of bytes, host copy); no copy (None) if it was freed."""
    copies: dict[int, tuple[UntypedStorage, Tensor]] = field(default_factory=dict)
    """Maps the id (`_cdata`) of a frozen storage to (storage, its host copy). A copy is kept while
    the storage is on the device too."""


class Ledger:
    """The storages of one rank by kind (such as `parameters`). A kind is moved as a whole."""

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
        """Register a kind and the function `tensors`, which returns its tensors. A storage that an
        earlier kind also has stays with that kind.

        `disposable`: the contents are not needed between steps, so the kind may be freed.
        `on_host`: the tensors are always on the host and never move. `keeps_frozen`: host copies of
        frozen weights are kept and never written again, so these weights must have their final
        values when the kind first moves.
        """
        assert kind not in self._owners, f"the ledger has {kind!r} already"
        place: Place = "host" if on_host else "device"
        self._owners[kind] = _Owner(tensors, disposable, on_host, keeps_frozen, place)

    def place(self, kind: str) -> Place:
        return self._owners[kind].place

    def is_disposable(self, kind: str) -> bool:
        """Return whether the contents of a kind are not needed between steps."""
        return self._owners[kind].disposable

    def require_on_device(self, *kinds: str) -> None:
        """Raise RuntimeError if one of `kinds` is not on the device, because its tensors then have
        no contents."""
        away = {kind: self.place(kind) for kind in kinds if self.place(kind) != "device"}
        if away:
            raise RuntimeError(f"memory ledger: expected {kinds} on the device, got {away}")

    def to_host(self, kind: str) -> int:
        """Copy a kind to the host and free its device memory for this process.

        Return the number of copied bytes. Raises RuntimeError if the kind is not on the device, or
        never moves.
        """
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
        """Free the device memory of a disposable kind; its contents are lost. Raises RuntimeError
        if the kind is not disposable or not on the device."""
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
        """Move away those of `kinds` that are on the device: free disposable kinds, and copy the
        others to the host.

        Return the number of copied bytes.
        """
        num_copied = 0
        for kind in [kind for kind in kinds if self.place(kind) == "device"]:
            if self.is_disposable(kind):
                self.free(kind)
            else:
                num_copied += self.to_host(kind)
        return num_copied

    def to_device(self, kind: str) -> int:
        """Bring a kind back to the device with its old contents, or with zeros if it was freed.

        Return the number of copied bytes. Raises RuntimeError if the kind is on the device already,
        or never moves.
        """
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
        """Return all free device memory to the driver, for an engine on the same device. Does
        nothing on a CPU.

        It waits for the copies to the host, so call it once after all kinds have moved.
        """
        if self._pinned:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def drop(self, kind: str) -> None:
        """Forget a kind and free all its memory on device and host. Its tensors have no bytes
        afterwards.

        The host buffers that the kind used are freed too. A kind that was never registered is
        ignored.
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
        """Return this rank's bytes of each kind (see `Bytes`). No storage is counted twice."""
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
        """The bytes of host memory that the ledger holds for copies, in use or not."""
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
        """Return, by kind, the storages that hold bytes now. A storage that several kinds have is
        listed under the first of them.

        `with_away`: include the kinds that were moved away. These kinds may still have storages with
        bytes, such as Adam's step counts.
        """
        taken = {s._cdata for owner in self._owners.values() for s, _, _ in owner.away}
        found: dict[str, list[UntypedStorage]] = {}
        for kind, owner in self._owners.items():
            mine = found[kind] = []
            if owner.place != "device" and not with_away:
                continue  # there may be many policies, and only one is on the device
            for tensor in owner.tensors():
                storage = tensor.untyped_storage()
                if storage._cdata not in taken and storage.nbytes():
                    taken.add(storage._cdata)
                    mine.append(storage)
        return found

    def _device_bytes(self, storage: UntypedStorage) -> int:
        return storage.nbytes() if storage.device.type == self._device else 0

    def _on_device(self) -> dict[str, list[UntypedStorage]]:
        """Return the storages on the device, by kind.

        On a GPU machine some tensors stay on the CPU, such as Adam's step counts.
        """
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
    """Yield the buffers in which Megatron's DDP reduces gradients."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def parameter_tensors(chunks: list[Any]) -> Iterator[Tensor]:
    """Yield the weights and registered buffers (expert biases) of the chunks."""
    for chunk in chunks:
        yield from chunk.parameters()
        for _, buffer in chunk.named_buffers():  # DDP's own `buffers` are its gradient buffers
            yield buffer


def _is_frozen(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight that is not trained. Returns False for a registered
    buffer, because it may change."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer: the main parameters (fp32 copies of the weights, or the
    weights themselves in an fp32 model) and the state, such as Adam's moments.

    The tensors that a HybridDeviceOptimizer keeps on the host, including its gradients, are yielded
    too; they never move.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        outer = part.optimizer
        if outer is None:  # this rank trains no dense parameters, or no experts
            continue
        for inner in (outer, *getattr(outer, "sub_optimizers", ())):
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                for value in filter(torch.is_tensor, state.values()):
                    yield getattr(value, "_data", value)  # of an fp8 tensor of TransformerEngine
        yield from getattr(outer, "cpu_copy_map_grad", {}).values()


def memory_statistics(phase: str, where: Mapping[str, Bytes]) -> Statistics:
    """Return the statistics `memory/PHASE/KIND_device_bytes` and `memory/PHASE/KIND_host_bytes` of
    each kind. Each is reported as the largest number of bytes over the ranks."""
    return {
        f"memory/{phase}/{kind}_{place}_bytes": Max(torch.tensor(float(getattr(count, place))))
        for kind, count in where.items()
        for place in ("device", "host")
    }


def device_memory(device: torch.device) -> Statistics:
    """Return the GPU memory that torch has allocated now, and its peak since the last call, as
    statistics in bytes; empty on a CPU."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/allocated_bytes": Max(torch.tensor(float(torch.cuda.memory_allocated(device)))),
        "memory/peak_bytes": Max(torch.tensor(float(peak))),
    }
