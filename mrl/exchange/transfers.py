"""Computes the transfers of an exchange: which rank sends which parts of samples to which rank.

Every rank knows, for each sample, which ranks hold it and which ranks need it, and so computes its
own transfers without asking other ranks. Ranks of one node read the shared memory of the rank that
holds a sample (`mrl.system.shared_memory`). Between nodes, bytes are sent once: if several ranks of
a node need the same bytes, as tensor-parallel ranks do, one rank receives the bytes and shares them
with the other ranks through its memory.

A `Payload` encodes what a transfer carries: routes of some layers, or the tokens of samples.
`mrl.exchange.transport` carries the transfers out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

TOKENS = 0
"""The number in `Selection.layers` that stands for tokens and log-probs. MoE layers have numbers
from 1."""


@dataclass(frozen=True)
class Selection:
    """Some layers of some samples, which a rank needs or a transfer carries."""

    samples: tuple[int, ...]
    """Ascending indices into the step's list of samples."""
    layers: tuple[int, ...]
    """Megatron's 1-based numbers of MoE layers, or only TOKENS for tokens and log-probs. Empty if
    the rank needs nothing."""


@dataclass(frozen=True)
class Transfer:
    """Bytes that the rank `reader` gets from the rank `source`, in a message or from the shared
    memory of `source`."""

    source: int
    reader: int
    selection: Selection


Page = tuple[tuple[int, ...], int]
"""(layers, index of a sample): identifies a contiguous piece of a rank's shared memory."""


@dataclass
class Transfers:
    """The transfers in which one rank takes part."""

    arriving: list[Transfer] = field(default_factory=list)
    """Messages to this rank, at most one from each other rank."""
    leaving: list[Transfer] = field(default_factory=list)
    """Messages from this rank, at most one to each other rank."""
    reading: list[Transfer] = field(default_factory=list)
    """Transfers that this rank reads from the memory of other ranks of its node."""
    pages: dict[int, list[Page]] = field(default_factory=dict)
    """For each rank of this node, the pages in its shared memory, in memory order."""


class Payload(Protocol):
    """Encodes the parts of samples that a transfer carries. Every rank can compute the size of any
    part."""

    def num_bytes(self, sample: int, layers: tuple[int, ...]) -> int:
        """Return the size in bytes of the given layers of the sample with index `sample`."""
        ...

    def pack(self, selection: Selection) -> Tensor:
        """Return the bytes of the selection, u8[bytes], one sample after the other. This rank must
        hold the samples."""
        ...


def compute_transfers(
    rank: int,
    needed: Mapping[int, Selection],
    held: Sequence[Collection[int]],
    nodes: Sequence[int],
) -> Transfers:
    """Return the transfers of `rank` in an exchange that gives every rank what it needs.

    A sample that the reader holds is not transferred. Any other sample comes from the memory of the
    lowest rank on the reader's node that holds it. If no rank of the node holds it, one of the
    node's readers gets it in a message from the lowest of all ranks that hold it, and shares it with
    the other readers on the node.

    Args:
        rank: the rank whose transfers are returned.
        needed: the samples and layers that each rank needs, by rank. Ranks that need nothing may be
        missing.
        held: for each rank, the indices of the samples that it holds.
        nodes: for each rank, a number that is the same for all ranks that read each other's memory.

    Raises:
        RuntimeError: no rank holds a sample that some rank needs.
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
    """Add the transfers for `readers`, the ranks of this node that need `selection`: messages to
    `rank`, reads by `rank` from the memory of other ranks, and the pages of all ranks of the node.

    `local` has, for each rank, the indices of the samples that it holds. `near` maps a sample to
    the lowest rank of this node that holds it, and `holders` to the lowest of all ranks that hold
    it.
    """
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
    """Return which of a node's `readers` receives a sample on behalf of all of them. The readers
    take turns by sample index."""
    return readers[sample % len(readers)]


def _check_held(needed: Mapping[int, Selection], holders: Mapping[int, int]) -> None:
    for selection in set(needed.values()):
        lost = [i for i in selection.samples if i not in holders] if selection.layers else []
        if lost:
            reader = next(r for r, s in sorted(needed.items()) if s == selection)
            raise RuntimeError(
                f"no rank holds what was rolled out for samples {lost[:10]}, rank {reader} needs it"
            )
