"""Parts of samples on their way between ranks: who gives what to whom, and the two ways there.

All ranks know of all samples which rank holds them and which ranks want them, so each makes its own
plan and nobody has to ask. Ranks of one node read the memory of the rank that holds a sample
(`mrl.system.shared_bytes`). Between nodes, bytes travel once: one of the ranks of a node that want
the same receives them and lays them into its memory for the others (tensor-parallel
ranks all want the same).

What a parcel holds is up to its `Cargo`: routes of some layers, or the tokens of a sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.exchange.sharing import share_bytes
from mrl.system.shared_bytes import Handle, SharedBytes
from parallel.mesh import Mesh

TOKENS = 0
"""Among the layers that somebody wants: the tokens and log-probs themselves (layers count from 1)."""


@dataclass(frozen=True)
class Want:
    """What a rank needs."""

    samples: tuple[int, ...]
    """Numbers in the step's list, ascending."""
    layers: tuple[int, ...]
    """Megatron's numbers, or TOKENS alone; empty where the rank needs nothing."""


@dataclass(frozen=True)
class Parcel:
    """What one rank gets from another, by a message or from its memory."""

    source: int
    reader: int
    want: Want


Page = tuple[tuple[int, ...], int]
"""(layers, number of a sample) in the memory of a rank."""


@dataclass
class Transfers:
    """What one rank has to do with an exchange."""

    arriving: list[Parcel] = field(default_factory=list)
    """Messages to this rank, at most one from each other."""
    leaving: list[Parcel] = field(default_factory=list)
    """Messages from this rank, at most one to each other."""
    reading: list[Parcel] = field(default_factory=list)
    """From the memory of other ranks of the node."""
    pages: dict[int, list[Page]] = field(default_factory=dict)
    """By rank of this node: what is in its memory, in order."""


class Cargo(Protocol):
    """What travels. Every rank knows the size of everything."""

    def num_bytes(self, sample: int, layers: tuple[int, ...]) -> int: ...

    def pack(self, want: Want) -> Tensor:
        """u8[bytes]: of samples that this rank holds, one after the other."""
        ...


def plan_transfers(
    rank: int,
    wants: Mapping[int, Want],
    held: Sequence[Collection[int]],
    nodes: Sequence[int],
) -> Transfers:
    """The share of `rank`. Whoever has a sample gets nothing of it. A sample comes from the lowest rank
    of the reader's node that holds it; where none does, from the lowest that does, in a message.

    `held`: by rank, the numbers of the samples that it has. `nodes`: by rank, a number that ranks
    share which read each other's memory. Raises RuntimeError where nobody has what somebody wants.
    """
    own = [frozenset(numbers) for numbers in held]
    holders: dict[int, int] = {}
    near: dict[int, int] = {}
    by_node: dict[int, set[int]] = defaultdict(set)
    for giver in reversed(range(len(own))):
        holders |= dict.fromkeys(own[giver], giver)
        by_node[nodes[giver]] |= own[giver]
        if nodes[giver] == nodes[rank]:
            near |= dict.fromkeys(own[giver], giver)
    units: dict[tuple[int, Want], list[int]] = defaultdict(list)
    for reader, want in sorted(wants.items()):
        if want.layers and want.samples:
            units[nodes[reader], want].append(reader)
    _check_held(wants, holders)
    plan = Transfers()
    given = [i for i in sorted(own[rank]) if holders[i] == rank]
    for (node, want), readers in units.items():
        if node == nodes[rank]:
            _plan_near(plan, rank, want, readers, own, near, holders)
            continue
        missing = frozenset(want.samples) - by_node[node]
        by_relay: dict[int, list[int]] = defaultdict(list)
        for i in given:
            if i in missing:
                by_relay[_relay(i, readers)].append(i)
        for relay, numbers in by_relay.items():
            plan.leaving.append(Parcel(rank, relay, Want(tuple(numbers), want.layers)))
    plan.pages = {source: sorted(set(pages)) for source, pages in plan.pages.items()}
    return plan


def _plan_near(
    plan: Transfers,
    rank: int,
    want: Want,
    readers: Sequence[int],
    own: Sequence[Collection[int]],
    near: Mapping[int, int],
    holders: Mapping[int, int],
) -> None:
    """What ranks of this node want: messages to `rank`, its reading, and the pages of all of them."""
    messages: dict[int, list[int]] = defaultdict(list)
    reading: dict[int, list[int]] = defaultdict(list)
    for i in want.samples:
        source = near.get(i)
        if source is None:
            source = _relay(i, readers)
            if source == rank:
                messages[holders[i]].append(i)
        others = [r for r in readers if r != source and i not in own[r]]
        if others:
            plan.pages.setdefault(source, []).append((want.layers, i))
        if rank in others:
            reading[source].append(i)
    for source, numbers in sorted(messages.items()):
        plan.arriving.append(Parcel(source, rank, Want(tuple(numbers), want.layers)))
    for source, numbers in sorted(reading.items()):
        plan.reading.append(Parcel(source, rank, Want(tuple(numbers), want.layers)))


def _relay(sample: int, readers: Sequence[int]) -> int:
    """Which of the ranks of a node that want a sample receives it: they take turns."""
    return readers[sample % len(readers)]


def _check_held(wants: Mapping[int, Want], holders: Mapping[int, int]) -> None:
    for want in set(wants.values()):
        lost = [i for i in want.samples if i not in holders] if want.layers else []
        if lost:
            reader = next(r for r, w in sorted(wants.items()) if w == want)
            raise RuntimeError(
                f"no rank holds what was rolled out for samples {lost[:10]}, rank {reader} wants it"
            )


@dataclass(frozen=True)
class _Seat:
    """What all ranks know of a rank."""

    place: Any
    memory: Handle


class ParcelExchange:
    """The exchanges of one run. Every method is a collective: call it on all ranks."""

    def __init__(self, mesh: Mesh, place: Any = None, *, share_memory: bool = True) -> None:
        """`place`: whatever the other ranks are to know of this one. Without `share_memory` everything
        is sent, as between nodes of one rank each."""
        self._rank, self._world = mesh.rank, mesh.dims.world
        self._memory = SharedBytes()
        self._seats: list[_Seat] = self._gather(_Seat(place, self._memory.handle))
        readable: list[set[int]] = self._gather(
            {r for r, s in enumerate(self._seats) if share_memory and s.memory.can_be_read()}
        )
        self.nodes = nodes_of(readable)
        self.num_bytes_shared = self.num_bytes_sent = 0
        """Of the last exchange, by this rank: what it laid into its memory, as the system counts it,
        and into messages."""

    @property
    def places(self) -> list[Any]:
        """By rank, what it gave."""
        return [seat.place for seat in self._seats]

    def share_held(self, numbers: Iterable[int]) -> list[list[int]]:
        """By rank, the numbers of the samples that it holds."""
        mine = np.array(list(numbers), dtype="<i4")
        if self._world == 1:
            return [mine.tolist()]
        return [np.frombuffer(part, dtype="<i4").tolist() for part in share_bytes(mine.tobytes())]

    def exchange(
        self, cargo: Cargo, wants: Mapping[int, Want], held: Sequence[Collection[int]]
    ) -> list[tuple[Want, Tensor]]:
        """What this rank wants and lacks: u8[bytes] of each part, its samples one after the other."""
        self.num_bytes_shared = self.num_bytes_sent = 0
        plan = plan_transfers(self._rank, wants, held, self.nodes)
        got = self._send_and_receive(plan, cargo)
        self._lay_out(plan, cargo, got)
        # All ranks know whether anybody may read; a barrier of some would never end.
        reads = len(set(self.nodes)) < self._world and any(
            want.layers and want.samples for want in wants.values()
        )
        if reads:
            dist.barrier()  # everything is written
            got += [(parcel.want, self._read(parcel, plan, cargo)) for parcel in plan.reading]
            dist.barrier()  # everything is read
            self.num_bytes_shared = self._memory.num_bytes
            self._memory.clear()
        return got

    def _send_and_receive(self, plan: Transfers, cargo: Cargo) -> list[tuple[Want, Tensor]]:
        """The tensors must live until they have arrived."""
        got, works = [], []
        for parcel in plan.arriving:
            wire = _empty_wire(parcel.want, cargo)
            got.append((parcel.want, wire))
            works.append((dist.irecv(wire, parcel.source), wire))
        for parcel in plan.leaving:
            wire = cargo.pack(parcel.want).flatten()
            self.num_bytes_sent += wire.numel()
            works.append((dist.isend(wire, parcel.reader), wire))
        for work, _ in works:
            assert work is not None
            work.wait()
        return got

    def _lay_out(self, plan: Transfers, cargo: Cargo, got: Sequence[tuple[Want, Tensor]]) -> None:
        """Write this rank's pages: samples that it holds, and those that it received for others."""
        offsets = _offsets(plan.pages.get(self._rank, ()), cargo)
        for want, wire in got:
            self._write(want, wire, offsets, cargo)
        relayed = {(want.layers, i) for want, _ in got for i in want.samples}
        by_layers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for layers, i in offsets.keys() - relayed:
            by_layers[layers].append(i)
        for layers, numbers in by_layers.items():
            want = Want(tuple(sorted(numbers)), layers)
            self._write(want, cargo.pack(want).flatten(), offsets, cargo)

    def _write(self, want: Want, wire: Tensor, offsets: Mapping[Page, int], cargo: Cargo) -> None:
        sizes = [cargo.num_bytes(i, want.layers) for i in want.samples]
        for i, part in zip(want.samples, wire.split(sizes), strict=True):
            if (offset := offsets.get((want.layers, i))) is not None:
                self._memory.write(offset, part)

    def _read(self, parcel: Parcel, plan: Transfers, cargo: Cargo) -> Tensor:
        wire, want = _empty_wire(parcel.want, cargo), parcel.want
        offsets = _offsets(plan.pages[parcel.source], cargo)
        parts = wire.split([cargo.num_bytes(i, want.layers) for i in want.samples])
        self._seats[parcel.source].memory.read(
            [(offsets[want.layers, i], part) for i, part in zip(want.samples, parts, strict=True)]
        )
        return wire

    def _gather(self, value: Any) -> list[Any]:
        """Once a run, of a few bytes a rank."""
        if self._world == 1:
            return [value]
        values = [None] * self._world
        dist.all_gather_object(values, value)
        return values


def nodes_of(readable: Sequence[Collection[int]]) -> list[int]:
    """By rank, the lowest of the ranks that all read each other's memory; `readable` are those whose
    memory each rank reads. A rank that is not read by all that it reads is a node of its own."""
    mutual = [
        frozenset({r} | {s for s in those if r in readable[s]}) for r, those in enumerate(readable)
    ]
    return [
        min(those) if all(mutual[s] == those for s in those) else r
        for r, those in enumerate(mutual)
    ]


def _offsets(pages: Sequence[Page], cargo: Cargo) -> dict[Page, int]:
    """Where in the memory of a rank its pages are."""
    sizes = [cargo.num_bytes(i, layers) for layers, i in pages]
    return dict(zip(pages, accumulate(sizes, initial=0), strict=False))


def _empty_wire(want: Want, cargo: Cargo) -> Tensor:
    return torch.empty(
        sum(cargo.num_bytes(i, want.layers) for i in want.samples), dtype=torch.uint8
    )
