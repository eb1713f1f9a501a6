"""This module carries out transfers: in messages between nodes, through memory on a node.

`mrl.exchange.transfers` says what every rank sends, reads and keeps in its memory for others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.exchange.sharing import share_bytes
from mrl.exchange.transfers import Cargo, Page, Selection, Transfer, Transfers, compute_transfers
from mrl.system.shared_memory import Handle, SharedBytes
from parallel.mesh import Mesh


@dataclass(frozen=True)
class _Peer:
    """Holds what all ranks know of a rank."""

    coordinates: Any
    memory: Handle


class Transport:
    """Carries out the exchanges of one run. Every method is a collective: call it on all ranks."""

    def __init__(self, mesh: Mesh, coordinates: Any = None, *, share_memory: bool = True) -> None:
        """`coordinates` is whatever the other ranks must know of this one. Without `share_memory`
        everything is sent, as between nodes of one rank each."""
        self._rank, self._world = mesh.rank, mesh.dims.world
        self._memory = SharedBytes()
        self._peers: list[_Peer] = self._gather(_Peer(coordinates, self._memory.handle))
        readable: list[set[int]] = self._gather(
            {r for r, s in enumerate(self._peers) if share_memory and s.memory.can_be_read()}
        )
        self.nodes = nodes_of(readable)
        self.num_bytes_shared = self.num_bytes_sent = 0
        """Bytes of the last exchange that this rank put into its memory, as the system counts them, and
        into messages."""

    @property
    def coordinates(self) -> list[Any]:
        """The coordinates that each rank gave, by rank."""
        return [peer.coordinates for peer in self._peers]

    def share_held(self, indices: Iterable[int]) -> list[list[int]]:
        """Return, by rank, the indices of the samples that it holds; `indices` are this rank's."""
        mine = np.array(list(indices), dtype="<i4")
        if self._world == 1:
            return [mine.tolist()]
        return [np.frombuffer(part, dtype="<i4").tolist() for part in share_bytes(mine.tobytes())]

    def exchange(
        self, cargo: Cargo, needed: Mapping[int, Selection], held: Sequence[Collection[int]]
    ) -> list[tuple[Selection, Tensor]]:
        """Return what this rank needs and does not hold: u8[bytes] of each selection, one sample after
        the other."""
        self.num_bytes_shared = self.num_bytes_sent = 0
        transfers = compute_transfers(self._rank, needed, held, self.nodes)
        got = self._send_and_receive(transfers, cargo)
        self._lay_out(transfers, cargo, got)
        # Every rank must decide alike: a barrier that only some of them enter never ends.
        reads = len(set(self.nodes)) < self._world and any(
            selection.layers and selection.samples for selection in needed.values()
        )
        if reads:
            dist.barrier()  # everything is written
            got += [
                (transfer.selection, self._read(transfer, transfers, cargo))
                for transfer in transfers.reading
            ]
            dist.barrier()  # everything is read
            self.num_bytes_shared = self._memory.num_bytes
            self._memory.clear()
        return got

    def _send_and_receive(
        self, transfers: Transfers, cargo: Cargo
    ) -> list[tuple[Selection, Tensor]]:
        got, works = [], []  # works hold the tensors too: these must live until they have arrived
        for transfer in transfers.arriving:
            wire = _empty_wire(transfer.selection, cargo)
            got.append((transfer.selection, wire))
            works.append((dist.irecv(wire, transfer.source), wire))
        for transfer in transfers.leaving:
            wire = cargo.pack(transfer.selection).flatten()
            self.num_bytes_sent += wire.numel()
            works.append((dist.isend(wire, transfer.reader), wire))
        for work, _ in works:
            assert work is not None
            work.wait()
        return got

    def _lay_out(
        self, transfers: Transfers, cargo: Cargo, got: Sequence[tuple[Selection, Tensor]]
    ) -> None:
        """Write this rank's pages: samples that it holds, and those that it received for others."""
        offsets = _offsets(transfers.pages.get(self._rank, ()), cargo)
        for selection, wire in got:
            self._write(selection, wire, offsets, cargo)
        relayed = {(selection.layers, i) for selection, _ in got for i in selection.samples}
        by_layers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for layers, i in offsets.keys() - relayed:
            by_layers[layers].append(i)
        for layers, indices in by_layers.items():
            selection = Selection(tuple(sorted(indices)), layers)
            self._write(selection, cargo.pack(selection).flatten(), offsets, cargo)

    def _write(
        self, selection: Selection, wire: Tensor, offsets: Mapping[Page, int], cargo: Cargo
    ) -> None:
        sizes = [cargo.num_bytes(i, selection.layers) for i in selection.samples]
        for i, part in zip(selection.samples, wire.split(sizes), strict=True):
            if (offset := offsets.get((selection.layers, i))) is not None:
                self._memory.write(offset, part)

    def _read(self, transfer: Transfer, transfers: Transfers, cargo: Cargo) -> Tensor:
        samples, layers = transfer.selection.samples, transfer.selection.layers
        wire = _empty_wire(transfer.selection, cargo)
        offsets = _offsets(transfers.pages[transfer.source], cargo)
        parts = wire.split([cargo.num_bytes(i, layers) for i in samples])
        self._peers[transfer.source].memory.read(
            [(offsets[layers, i], part) for i, part in zip(samples, parts, strict=True)]
        )
        return wire

    def _gather(self, value: Any) -> list[Any]:
        """Return every rank's value; called once a run, with a few bytes a rank."""
        if self._world == 1:
            return [value]
        values = [None] * self._world
        dist.all_gather_object(values, value)
        return values


def nodes_of(readable: Sequence[Collection[int]]) -> list[int]:
    """Return, by rank, the lowest of the ranks that all read each other's memory.

    `readable`: by rank, the ranks whose memory it reads. A rank that is not read by all ranks that it
    reads is a node of its own.
    """
    mutual = [
        frozenset({r} | {s for s in those if r in readable[s]}) for r, those in enumerate(readable)
    ]
    return [
        min(those) if all(mutual[s] == those for s in those) else r
        for r, those in enumerate(mutual)
    ]


def _offsets(pages: Sequence[Page], cargo: Cargo) -> dict[Page, int]:
    """Return where in the memory of a rank its pages start."""
    sizes = [cargo.num_bytes(i, layers) for layers, i in pages]
    return dict(zip(pages, accumulate(sizes, initial=0), strict=False))


def _empty_wire(selection: Selection, cargo: Cargo) -> Tensor:
    return torch.empty(
        sum(cargo.num_bytes(i, selection.layers) for i in selection.samples), dtype=torch.uint8
    )
