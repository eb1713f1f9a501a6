"""Snapshots: checkpoints on the nodes themselves, so that the loss of a rank costs few steps.

Each rank writes a file, its share, into the folder of its own node (`node_folder.py`). It sends a copy
to a rank of the next node, so that a copy remains if a node is lost. The small files are on every node.
RUN/checkpoints/snapshot.json names the newest complete snapshot (`snapshot_note.py`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import is_main_replica
from torch.distributed.checkpoint.metadata import Metadata

from mrl.errors import InputError, RunFailed
from mrl.system.disk import free_bytes
from mrl.system.files import bytes_in_words
from mrl.system.heartbeat import phase
from parallel.checkpoint import manifest
from parallel.checkpoint.agreement import first_reason, on_ranks
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.file_moves import Move, move_files
from parallel.checkpoint.loaded import Loaded, by_prefix
from parallel.checkpoint.node_folder import KEY, NodeFolder
from parallel.checkpoint.pending_save import Record
from parallel.checkpoint.shard_writer import ShardWriter
from parallel.checkpoint.sharded_state import state_shards
from parallel.checkpoint.snapshot_files import (
    is_share,
    listed_files,
    share,
    shares_read,
    small_files,
    whole_files,
    write_small,
)
from parallel.checkpoint.snapshot_note import (
    Note,
    newest_checkpoint,
    note_to_resume,
    read_note,
    remove_note,
    write_note,
)
from parallel.megatron_model import MegatronModel
from parallel.mesh import Mesh, gather_objects
from parallel.optimizer.state import optimizer_shards


class Snapshots(Checkpoints):
    """The snapshots of a run, of which only the newest is kept. Every method except `is_due` and
    `metrics` is a collective.

    Before `open` is called, no snapshot is due, loaded or removed. The same is true afterwards if
    `every` is 0 and no earlier start left a snapshot.
    """

    def __init__(
        self,
        run: Path,
        root: Path,
        mesh: Mesh,
        *,
        every: int,
        num_steps: int,
        seed: int = 0,
        warn: Callable[[str], None] = lambda text: None,
        record: Record | None = None,
    ) -> None:
        """Prepare for snapshots. Their files on this node are in `root`.

        `run` is the folder of the run's checkpoints. A snapshot is due every `every` steps, or
        never if `every` is 0. A snapshot of step `num_steps` or later is not loaded.
        """
        super().__init__(root, mesh, keep=2, seed=seed, warn=warn, record=record)
        self.run = run
        self.every = every
        self.num_steps = num_steps
        self.nodes: list[list[int]] = []
        """The ranks of each node. Nodes are sorted by their lowest rank."""
        self._node = NodeFolder(root)
        self._held: list[set[str]] = []
        """For each node, the names of the files of which it has an undamaged copy. They belong to
        the snapshot that is to be loaded."""
        self._seconds = 0.0
        self._num_bytes = 0
        self._copy_seconds = 0.0
        self._copy_bytes = 0

    def open(self, policy: MegatronModel, critic: MegatronModel | None = None) -> None:
        """Make and lock this node's folder, and find out which ranks share it. Do nothing if no
        snapshots are taken and no earlier start left a snapshot.

        Raises InputError on all ranks if one rank cannot use its folder, or has too little space
        there.
        """
        wanted = [bool(self.every) or read_note(self.run) is not None]
        dist.broadcast_object_list(wanted)
        if not wanted[0]:
            return
        token, refusal = "", None
        try:
            token = self._node.claim()
            swept = self._node.sweep()
        except InputError as error:
            refusal, swept = str(error), []
        if refusal := first_reason(refusal):
            raise InputError(refusal)
        for folder in swept:
            self.warn(f"{folder} was left by a run that has ended, and is removed")
        by_token: dict[str, list[int]] = {}
        for rank, each in enumerate(gather_objects(token)):
            by_token.setdefault(each, []).append(rank)
        self.nodes = list(by_token.values())
        self.folder_ranks = [ranks[0] for ranks in self.nodes]
        if self.every:
            self._check_room(policy, critic)

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot is due after `step` steps."""
        return bool(self.nodes and self.every and step % self.every == 0)

    @phase("save:snapshot")
    def take(
        self,
        step: int,
        policy: MegatronModel,
        trainer: dict[str, Any],
        critic: MegatronModel | None = None,
    ) -> None:
        """Take a snapshot, wait until it is complete, and then remove the previous snapshot.

        If the snapshot cannot be written, a warning is given and the run continues.
        """
        start = time.perf_counter()
        try:
            folder = self.save(step, policy, trainer, critic)
            self._spread(folder, step)
        except RunFailed as error:  # on all ranks
            self.warn(
                f"snapshot of step {step} is not whole, the run continues without it: {error}"
            )
        self._seconds += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return the seconds that snapshots have taken since the last call, and the size in bytes
        of the last snapshot. With several nodes, also return the seconds and bytes of the copies
        to the next nodes. The result is empty if no snapshots are taken."""
        if not self.every:
            return {}
        seconds, self._seconds = self._seconds, 0.0
        found = {"time/snapshot_s": seconds, "memory/snapshot_bytes": float(self._num_bytes)}
        if len(self.nodes) > 1:
            copying, self._copy_seconds = self._copy_seconds, 0.0
            copied = float(self._copy_bytes)
            found |= {"time/snapshot_copy_s": copying, "memory/snapshot_copy_bytes": copied}
        return found

    @phase("load:snapshot")
    def load_newer(
        self, policy: MegatronModel, critic: MegatronModel | None = None
    ) -> Loaded | None:
        """Load the snapshot if it is complete and newer than the newest checkpoint. Return None if
        no snapshot is loaded.

        A snapshot that is not loaded is removed, because the run continues without it.
        """
        if not self.nodes:
            return None
        found = [note_to_resume(self.run, self.num_steps) if self.mesh.rank == 0 else None]
        dist.broadcast_object_list(found)
        note = found[0]
        if note is not None:
            reason = self._find(note)
            if reason is None:
                folder = self.root / manifest.folder_name(note.step)
                return self._load(folder, by_prefix(policy, critic))
            self.warn(f"the snapshot of step {note.step} is left out: {reason}")
        self._forget()
        on_ranks(self.mesh, self.folder_ranks, self.root, self._node.clear)
        return None

    def close(self) -> None:
        """Remove the nodes' folders, unless they hold a snapshot that is newer than the newest
        checkpoint. Then release the lock."""
        if not self.nodes:
            return
        note, newest = read_note(self.run), newest_checkpoint(self.run)
        is_old = [note is None or (newest is not None and newest >= note.step)]
        dist.broadcast_object_list(is_old)
        if is_old[0]:
            self._forget()
            on_ranks(self.mesh, self.folder_ranks, self.root, self._node.remove)
        self._node.close()
        self.nodes = []

    def _forget(self) -> None:
        on_ranks(self.mesh, (0,), self.run, lambda: remove_note(self.run))

    @property
    def _own(self) -> list[int]:
        """The ranks of the node on which this process runs."""
        return next(ranks for ranks in self.nodes if self.mesh.rank in ranks)

    def _check_room(self, policy: MegatronModel, critic: MegatronModel | None) -> None:
        """Raise InputError on all ranks if a node lacks space for two snapshots.

        A node stores the shares of its own ranks, and copies of another node's shares.
        """
        own = 0
        for model in by_prefix(policy, critic).values():
            for shard in state_shards(model.trained, optimizer_shards(model.optimizer)):
                if is_main_replica(shard.replica_id) and shard.data is not None:
                    own += shard.data.numel() * shard.data.element_size()
        shares = gather_objects(own)
        kept = [
            *self._own,
            *(m.source for m in self._copies(range(len(shares))) if m.target in self._own),
        ]
        needed = 2 * sum(shares[rank] for rank in kept)
        free, refusal = free_bytes(self.root), None
        there = 0 if self.mesh.rank not in self.folder_ranks else self._node.num_bytes()
        if free is not None and self.mesh.rank in self.folder_ranks and free + there < needed:
            refusal = (
                f"{KEY}: two snapshots need {bytes_in_words(needed)} in {self.root} on host "
                f"{socket.gethostname()}, where {bytes_in_words(free + there)} are free; give {KEY} a "
                "folder on a local disk, enlarge /dev/shm (docker run --shm-size), or set "
                "checkpoint.snapshot_every=0"
            )
        if refusal := first_reason(refusal):
            raise InputError(refusal)

    def _copies(self, ranks: Collection[int]) -> list[Move]:
        """Return the moves that copy the shares (the large files) of `ranks`, each to a rank of the
        next node; an empty list if there is only one node."""
        moves = []
        for node, following in zip(self.nodes, [*self.nodes[1:], self.nodes[0]], strict=True):
            if node is following:
                continue  # there is only one node
            for number, rank in enumerate(node):
                if rank in ranks:
                    moves.append(Move(rank, following[number % len(following)], share(rank)))
        return moves

    def _spread(self, folder: Path, step: int) -> None:
        """Send the small files to every node, and copies of each node's shares to the next node.
        Then write the note of the snapshot, and remove older snapshots."""
        first: list[Any] = [None]

        def read() -> None:
            first[0] = small_files(folder), listed_files(folder)

        on_ranks(self.mesh, (0,), folder, read)
        dist.broadcast_object_list(first)
        small, listed = first[0]
        if len(self.nodes) > 1:
            unnamed = manifest.partial_folder(self.root, step)

            def name() -> None:
                write_small(unnamed, small)
                for report in unnamed.glob("written_*.json"):
                    report.unlink()
                manifest.publish(self.root, step, self.keep)

            on_ranks(self.mesh, self.folder_ranks[1:], folder, name)
            writers = {rank for rank in range(self.mesh.dims.world) if share(rank) in listed}
            moves, start = self._copies(writers), time.perf_counter()
            move_files(self.mesh, moves, folder, listed)
            self._copy_seconds += time.perf_counter() - start
            self._copy_bytes = sum(listed[move.name].num_bytes for move in moves)
        places = gather_objects((socket.gethostname(), str(self.root)))
        nodes = [{"host": places[r][0], "folder": places[r][1]} for r in self.folder_ranks]

        def write() -> None:
            digest = manifest.record(folder / manifest.MANIFEST).sha256
            write_note(self.run, Note(step, digest, newest_checkpoint(self.run), nodes))

        on_ranks(self.mesh, (0,), self.run, write)
        on_ranks(self.mesh, self.folder_ranks, folder, lambda: self._node.clear(folder.name))
        self._num_bytes = sum(record.num_bytes for record in listed.values())

    def _find(self, note: Note) -> str | None:
        """Find out which node has which undamaged files of the snapshot, and send the small files
        to the nodes that lack them.

        Return a message that says what is missing; None if the snapshot is complete.
        """
        folder = self.root / manifest.folder_name(note.step)
        number = self._own.index(self.mesh.rank)
        all_found = gather_objects(whole_files(folder, note.sha256, number, len(self._own)))
        names = next((set(listed) for listed, _ in all_found if listed), None)
        where = ", ".join(f"{node['folder']} of host {node['host']}" for node in note.nodes)
        if names is None:
            return f"it is on no node of this start, or its manifest is damaged; it was in {where}"
        self._held = [set().union(*(all_found[rank][1] for rank in ranks)) for ranks in self.nodes]
        if missing := sorted(names - set().union(*self._held)):
            return f"{missing[0]} is damaged, or on no node of this start; it was in {where}"
        small = {name for name in names if not is_share(name)}
        has_all = [
            small <= held and any(all_found[rank][0] for rank in ranks)
            for held, ranks in zip(self._held, self.nodes, strict=True)
        ]
        if not any(has_all):
            return f"no node has all of {', '.join(sorted(small))} whole"
        source = self.folder_ranks[has_all.index(True)]
        sent: list[dict[str, bytes]] = [{}]
        on_ranks(self.mesh, [source], folder, lambda: sent[0].update(small_files(folder)))
        dist.broadcast_object_list(sent, src=source)
        contents = sent[0]
        lacking = [
            rank for rank, is_there in zip(self.folder_ranks, has_all, strict=True) if not is_there
        ]

        def write() -> None:
            folder.mkdir(exist_ok=True)
            write_small(folder, contents)

        on_ranks(self.mesh, lacking, folder, write)
        return None

    def _needed_bytes(self, writer: ShardWriter, shards: list[ShardedTensor]) -> int:
        """Return 0, which turns off the check of the free space in a save: `open` has already
        checked the space that each node needs for its part of a snapshot."""
        return 0

    def _fetch_files(self, folder: Path, shards: list[ShardedTensor], saved: Metadata) -> None:
        """Send each node the shares (ranks' large files) that its ranks read and the node lacks."""
        needed = gather_objects(shares_read(shards, saved))
        moves = []
        for ranks, held in zip(self.nodes, self._held, strict=True):
            for number, name in enumerate(sorted(set().union(*(needed[r] for r in ranks)) - held)):
                owners = [
                    node for node, has in zip(self.nodes, self._held, strict=True) if name in has
                ]
                source = owners[number % len(owners)]
                moves.append(Move(source[number % len(source)], ranks[number % len(ranks)], name))
        if moves:
            move_files(self.mesh, moves, folder, listed_files(folder))
