"""Carries out the transfers of an exchange: messages between nodes, shared memory within a node.

`mrl.exchange.transfers` computes what each rank sends, reads, and puts into its memory for other ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.exchange.sharing import share_bytes
from mrl.exchange.transfers import Page, Payload, Selection, Transfer, Transfers, compute_transfers
from mrl.system.shared_memory import Handle, SharedBytes
from parallel.mesh import Mesh


class Transport:
    """Carries out the exchanges of a run. Every public method is a collective of all ranks."""

    def __init__(self, mesh: Mesh, coordinates: Any = None, *, share_memory: bool = True) -> None:
        """`coordinates` is any value about this rank that all other ranks must know. Without
        `share_memory`, everything is sent in messages, as if every rank were a node of its own."""
        self._rank, self._world = mesh.rank, mesh.dims.world
        self._memory = SharedBytes()
        peers: list[tuple[Any, Handle]] = self._gather((coordinates, self._memory.handle))
        self.coordinates = [coordinates for coordinates, _ in peers]
        """The `coordinates` that each rank passed, in rank order."""
        self._handles = [handle for _, handle in peers]
        readable: list[set[int]] = self._gather(
            {r for r, handle in enumerate(self._handles) if share_memory and handle.can_be_read()}
        )
        self.nodes = nodes_of(readable)
        self.num_bytes_shared = self.num_bytes_sent = 0
        """In the last exchange: the size of this rank's shared memory in bytes, as the operating
        system reports it, and the bytes that this rank sent in messages."""

    def share_held(self, indices: Iterable[int]) -> list[list[int]]:
        """Return for each rank the indices of the samples that it holds. `indices` are the samples
        that this rank holds."""
        mine = np.array(list(indices), dtype="<i4")
        if self._world == 1:
            return [mine.tolist()]
        return [np.frombuffer(part, dtype="<i4").tolist() for part in share_bytes(mine.tobytes())]

    def exchange(
        self, payload: Payload, needed: Mapping[int, Selection], held: Sequence[Collection[int]]
    ) -> list[tuple[Selection, Tensor]]:
        """Return the parts that this rank needs and does not hold, as pairs (selection, u8[bytes])
        with the bytes of one sample after the other. `needed` and `held` are as in
        `compute_transfers`."""
        self.num_bytes_shared = self.num_bytes_sent = 0
        transfers = compute_transfers(self._rank, needed, held, self.nodes)
        got = self._send_and_receive(transfers, payload)
        self._lay_out(transfers, payload, got)
        # All ranks must make the same decision: a barrier that only some of them enter never ends.
        reads = len(set(self.nodes)) < self._world and any(
            selection.layers and selection.samples for selection in needed.values()
        )
        if reads:
            dist.barrier()  # all pages are written
            got += [
                (transfer.selection, self._read(transfer, transfers, payload))
                for transfer in transfers.reading
            ]
            dist.barrier()  # all pages are read
            self.num_bytes_shared = self._memory.num_bytes
            self._memory.clear()
        return got

    def _send_and_receive(
        self, transfers: Transfers, payload: Payload
    ) -> list[tuple[Selection, Tensor]]:
        got, works = [], []  # `works` keeps tensors alive until they are sent or received
        for transfer in transfers.arriving:
            wire = _empty_wire(transfer.selection, payload)
            got.append((transfer.selection, wire))
            works.append((dist.irecv(wire, transfer.source), wire))
        for transfer in transfers.leaving:
            wire = payload.pack(transfer.selection).flatten()
            self.num_bytes_sent += wire.numel()
            works.append((dist.isend(wire, transfer.reader), wire))
        for work, _ in works:
            assert work is not None
            work.wait()
        return got

    def _lay_out(
        self, transfers: Transfers, payload: Payload, got: Sequence[tuple[Selection, Tensor]]
    ) -> None:
        """Write this rank's pages into its shared memory, for other ranks of the node to read. A
        page is a part of a sample that this rank holds, or that it has received in a message
        (`got`)."""
        offsets = _offsets(transfers.pages.get(self._rank, ()), payload)
        for selection, wire in got:
            self._write(selection, wire, offsets, payload)
        relayed = {(selection.layers, i) for selection, _ in got for i in selection.samples}
        by_layers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for layers, i in offsets.keys() - relayed:
            by_layers[layers].append(i)
        for layers, indices in by_layers.items():
            selection = Selection(tuple(sorted(indices)), layers)
            self._write(selection, payload.pack(selection).flatten(), offsets, payload)

    def _write(
        self, selection: Selection, wire: Tensor, offsets: Mapping[Page, int], payload: Payload
    ) -> None:
        sizes = [payload.num_bytes(i, selection.layers) for i in selection.samples]
        for i, part in zip(selection.samples, wire.split(sizes), strict=True):
            if (offset := offsets.get((selection.layers, i))) is not None:
                self._memory.write(offset, part)

    def _read(self, transfer: Transfer, transfers: Transfers, payload: Payload) -> Tensor:
        samples, layers = transfer.selection.samples, transfer.selection.layers
        wire = _empty_wire(transfer.selection, payload)
        offsets = _offsets(transfers.pages[transfer.source], payload)
        parts = wire.split([payload.num_bytes(i, layers) for i in samples])
        self._handles[transfer.source].read(
            [(offsets[layers, i], part) for i, part in zip(samples, parts, strict=True)]
        )
        return wire

    def _gather(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order. Called only at the start of a run, with a few
        bytes."""
        if self._world == 1:
            return [value]
        values = [None] * self._world
        dist.all_gather_object(values, value)
        return values


def nodes_of(readable: Sequence[Collection[int]]) -> list[int]:
    """Return for each rank the number of its node, which is the lowest rank of the node.

    `readable` has, for each rank, the ranks whose memory it can read. Ranks form a node if every
    two of them can read each other's memory, and none of them has this relation to a rank outside
    the node. Any other rank is a node of its own.
    """
    mutual = [
        frozenset({r} | {s for s in those if r in readable[s]}) for r, those in enumerate(readable)
    ]
    return [
        min(those) if all(mutual[s] == those for s in those) else r
        for r, those in enumerate(mutual)
    ]


def _offsets(pages: Sequence[Page], payload: Payload) -> dict[Page, int]:
    """Return the offset in bytes of each page in a rank's shared memory. `pages` are all pages of
    this memory, in memory order."""
    sizes = [payload.num_bytes(i, layers) for layers, i in pages]
    return dict(zip(pages, accumulate(sizes, initial=0), strict=False))


def _empty_wire(selection: Selection, payload: Payload) -> Tensor:
    return torch.empty(
        sum(payload.num_bytes(i, selection.layers) for i in selection.samples), dtype=torch.uint8
    )
