"""This module computes who gives which parts of samples to whom, and on which of two ways.

Every rank knows which rank holds each sample and which ranks need it, so each computes its own share of
the transfers and nobody has to ask. Ranks of one node read the memory of the rank that holds a sample
(`mrl.system.shared_memory`). Between nodes, bytes travel once: where several ranks of a node need the
same bytes, as tensor-parallel ranks do, one of them receives the bytes and shares them with the others
through its memory.

A `Cargo` says what a transfer holds: routes of some layers, or the tokens of a sample.
`mrl.exchange.transport` carries the transfers out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

TOKENS = 0
"""Stands for the tokens and log-probs in `Selection.layers`; MoE layers are numbered from 1."""


@dataclass(frozen=True)
class Selection:
    """A selection is some layers of some samples: what a rank needs, or what a transfer holds."""

    samples: tuple[int, ...]
    """Ascending indices into the step's list of samples."""
    layers: tuple[int, ...]
    """Megatron's layer numbers, or TOKENS alone; empty where the rank needs nothing."""


@dataclass(frozen=True)
class Transfer:
    """A transfer is what one rank gets from another, in a message or from its memory."""

    source: int
    reader: int
    selection: Selection


Page = tuple[tuple[int, ...], int]
"""(layers, index of a sample) in the memory of a rank."""


@dataclass
class Transfers:
    """Lists one rank's part in an exchange."""

    arriving: list[Transfer] = field(default_factory=list)
    """Messages to this rank, at most one from each other rank."""
    leaving: list[Transfer] = field(default_factory=list)
    """Messages from this rank, at most one to each other rank."""
    reading: list[Transfer] = field(default_factory=list)
    """What this rank reads from the memory of other ranks of its node."""
    pages: dict[int, list[Page]] = field(default_factory=dict)
    """What is in the memory of each rank of this node, in order."""


class Cargo(Protocol):
    """Packs what travels. Every rank can compute every size."""

    def num_bytes(self, sample: int, layers: tuple[int, ...]) -> int:
        """Return the packed size of these layers of the sample with this index."""
        ...

    def pack(self, selection: Selection) -> Tensor:
        """Return u8[bytes]: samples that this rank holds, one after the other."""
        ...


def compute_transfers(
    rank: int,
    needed: Mapping[int, Selection],
    held: Sequence[Collection[int]],
    nodes: Sequence[int],
) -> Transfers:
    """Return the part of `rank` in the exchange that gives every rank what it needs.

    A rank that holds a sample gets nothing of it. A sample comes from the lowest rank of the reader's
    node that holds it; where none does, from the lowest rank of all that holds it, in a message.

    `needed`: by rank, what it needs. `held`: by rank, the indices of the samples that it holds.
    `nodes`: by rank, a number shared by the ranks that read each other's memory. Raises RuntimeError
    where no rank holds what another one needs.
    """
    local = [frozenset(indices) for indices in held]
    holders: dict[int, int] = {}
    near: dict[int, int] = {}
    by_node: dict[int, set[int]] = defaultdict(set)
    for giver in reversed(range(len(local))):
        holders |= dict.fromkeys(local[giver], giver)
        by_node[nodes[giver]] |= local[giver]
        if nodes[giver] == nodes[rank]:
            near |= dict.fromkeys(local[giver], giver)
    units: dict[tuple[int, Selection], list[int]] = defaultdict(list)
    for reader, selection in sorted(needed.items()):
        if selection.layers and selection.samples:
            units[nodes[reader], selection].append(reader)
    _check_held(needed, holders)
    transfers = Transfers()
    given = [i for i in sorted(local[rank]) if holders[i] == rank]
    for (node, selection), readers in units.items():
        if node == nodes[rank]:
            _add_near(transfers, rank, selection, readers, local, near, holders)
            continue
        missing = frozenset(selection.samples) - by_node[node]
        by_relay: dict[int, list[int]] = defaultdict(list)
        for i in given:
            if i in missing:
                by_relay[_relay(i, readers)].append(i)
        for relay, indices in by_relay.items():
            sent = Selection(tuple(indices), selection.layers)
            transfers.leaving.append(Transfer(rank, relay, sent))
    transfers.pages = {source: sorted(set(pages)) for source, pages in transfers.pages.items()}
    return transfers


def _add_near(
    transfers: Transfers,
    rank: int,
    selection: Selection,
    readers: Sequence[int],
    local: Sequence[Collection[int]],
    near: Mapping[int, int],
    holders: Mapping[int, int],
) -> None:
    """Add what `readers`, ranks of this node, need: the messages to `rank`, what it reads, and the
    pages of all of them."""
    messages: dict[int, list[int]] = defaultdict(list)
    reading: dict[int, list[int]] = defaultdict(list)
    for i in selection.samples:
        source = near.get(i)
        if source is None:
            source = _relay(i, readers)
            if source == rank:
                messages[holders[i]].append(i)
        others = [r for r in readers if r != source and i not in local[r]]
        if others:
            transfers.pages.setdefault(source, []).append((selection.layers, i))
        if rank in others:
            reading[source].append(i)
    for source, indices in sorted(messages.items()):
        received = Selection(tuple(indices), selection.layers)
        transfers.arriving.append(Transfer(source, rank, received))
    for source, indices in sorted(reading.items()):
        read = Selection(tuple(indices), selection.layers)
        transfers.reading.append(Transfer(source, rank, read))


def _relay(sample: int, readers: Sequence[int]) -> int:
    """Return which of the readers of a node receives a sample for all: they take turns."""
    return readers[sample % len(readers)]


def _check_held(needed: Mapping[int, Selection], holders: Mapping[int, int]) -> None:
    for selection in set(needed.values()):
        lost = [i for i in selection.samples if i not in holders] if selection.layers else []
        if lost:
            reader = next(r for r, s in sorted(needed.items()) if s == selection)
            raise RuntimeError(
                f"no rank holds what was rolled out for samples {lost[:10]}, rank {reader} needs it"
            )
