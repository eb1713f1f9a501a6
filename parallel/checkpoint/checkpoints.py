"""Checkpoints that any layout can load, and from which the same layout resumes bit for bit.

`checkpoints/iter_0000010/` is a Megatron `torch_dist` checkpoint (`.metadata`, `__R_0.distcp`,
`common.pt`, `metadata.json`) with a manifest (`manifest.py`). It stores each tensor
as rectangles (`sharded_state.py`) under its name in the whole model, and one set of random states
for each rank. The trainer's own state is in the manifest. The folder gets its name only when it is
complete. With a critic, the folder holds both models; the critic's keys begin with `critic_`.
"""

from __future__ import annotations

import copyreg
import dataclasses
import importlib.metadata
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.utils import get_model_config
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from mrl.errors import InputError, RunFailed
from mrl.system.heartbeat import phase
from mrl.system.torch_names import TORCH
from mrl.version import __version__
from parallel.checkpoint import manifest
from parallel.checkpoint.agreement import failed, find_damage, first_reason, on_first_rank, on_ranks
from parallel.checkpoint.loaded import Loaded, Models, by_prefix
from parallel.checkpoint.model_identity import describe_model, other_model, refusal
from parallel.checkpoint.pending_save import PendingSave, Record, start_folder
from parallel.checkpoint.pickle_scan import check_pickles
from parallel.checkpoint.random_state import pack_random_state, reseed, restore_random_state
from parallel.checkpoint.shard_writer import ShardWriter
from parallel.checkpoint.sharded_state import (
    misfit,
    own_key,
    parameter_names,
    saved_key,
    state_shards,
)
from parallel.megatron_model import MegatronModel
from parallel.mesh import Mesh
from parallel.optimizer.state import optimizer_shards, set_step, steps_done, write_back

# Python 3.11.0 to 3.11.3 would write `getattr(_MEM_FORMAT_ENCODING, name)` into `.metadata`. A pickle
# that names getattr is refused, as it could reach anything, so write what other versions write.
copyreg.pickle(TORCH.take("_MEM_FORMAT_ENCODING"), lambda member: (type(member), (member.value,)))


RESCUE_S = 60.0


class Checkpoints:
    """The checkpoints of a run. Every method except `rescue` is a collective: call it on all ranks.

    With `async_save`, `save` returns after the copy to the host, and the checkpoint gets its name when
    everything is written. If writing fails, the next `poll` raises RunFailed on all ranks.
    """

    def __init__(
        self,
        root: Path,
        mesh: Mesh,
        *,
        keep: int,
        async_save: bool = False,
        seed: int = 0,
        warn: Callable[[str], None] = lambda text: None,
        record: Record | None = None,
    ) -> None:
        """Use the folder `root`, and keep the newest `keep` checkpoints in it.

        `seed` is the recipe's seed. Loading a checkpoint replaces it by the checkpoint's seed,
        which also seeds the random states if the layout has changed. `record` gives the files of
        the run that are copied into each checkpoint.
        """
        self.root, self.mesh, self.keep = root, mesh, keep
        self.async_save = async_save
        self.seed = seed
        self.warn = warn
        self.record = record
        self.folder_ranks: Sequence[int] = (0,)
        """The ranks that create the folder of a save: one rank for each file system."""
        self._queue = AsyncCallsQueue()
        self._in_flight: PendingSave | None = None

    @phase("save")
    def save(
        self,
        step: int,
        policy: MegatronModel,
        trainer: dict[str, Any],
        critic: MegatronModel | None = None,
        *,
        with_optimizer: bool = True,
    ) -> Path:
        """Save the policy, the critic if there is one, and the JSON-able `trainer` state. Without the
        optimizer, the checkpoint can be loaded only without it.

        Waits first for an earlier save in flight. Returns the folder that the checkpoint will have.
        After a crash at any moment, the previous checkpoint is untouched, and the file LATEST still
        names it. Raises RunFailed if a rank cannot write.
        """
        self.finish()
        models = by_prefix(policy, critic)
        mesh, unnamed = self.mesh, manifest.partial_folder(self.root, step)
        common: dict[str, Any] = {"seed": self.seed}
        shards: list[ShardedTensor] = []
        for prefix, model in models.items():
            model.require_state()
            common[f"{prefix}adam_step"] = steps_done(model.optimizer, mesh.device)
            common[f"{prefix}scheduler"] = model.scheduler.state_dict()
            model.gather_parameters()
            state = optimizer_shards(model.optimizer) if with_optimizer else {}
            shards += state_shards(model.trained, state, own_key(prefix))
        shards.append(self._random_shard())
        writer = ShardWriter(unnamed, mesh.rank, mesh.dims.world)
        num_bytes = self._needed_bytes(writer, shards)
        on_ranks(mesh, self.folder_ranks, unnamed, lambda: start_folder(unnamed, common, num_bytes))
        request = writer.request(shards, copy=self.async_save)
        content = self._content(step, models, trainer)
        record = self.record if mesh.rank == 0 else None
        self._in_flight = PendingSave(self.root, step, self.keep, content, writer, record)
        request.add_finalize_fn(self._name_in_flight)
        if self.async_save:
            self._in_flight.schedule(self._queue, request)
        else:
            request.execute_sync()
        return self.root / manifest.folder_name(step)

    def poll(self) -> None:
        """Complete the save in flight if every rank has written its part. Otherwise return without
        waiting."""
        self._queue.maybe_finalize_async_calls(blocking=False)

    @phase("save:finish")
    def finish(self) -> None:
        """Wait for the save in flight, if any."""
        self._queue.maybe_finalize_async_calls(blocking=True)

    def rescue(self, wait_s: float = RESCUE_S) -> None:
        """Complete the save in flight after a failure, if every rank has written its part.

        This is not a collective, because ranks may have died; it waits up to `wait_s` seconds for
        the ranks' parts. A save that cannot be completed is reported and removed. No error is
        raised, because the run is already failing with another error.
        """
        save, self._in_flight = self._in_flight, None
        if save is None:
            return
        self._queue = AsyncCallsQueue()
        name = manifest.folder_name(save.step)
        save.stop_watching()
        if save.is_published:
            return
        try:
            if save.failure:
                raise RunFailed(save.failure)
            save.writer.wait(wait_s)  # on every rank: the process that writes dies with its trainer
            if self.mesh.rank == 0:
                save.publish()
            self.warn(f"checkpoint {name} was in flight when the run stopped; it is whole")
        except Exception as error:
            self.warn(f"checkpoint {name} was in flight when the run stopped, and is lost: {error}")
            self._remove(save)  # the report of the failure may need its room on the disk

    def _name_in_flight(self) -> None:
        save, self._in_flight = self._in_flight, None
        assert save is not None
        save.stop_watching()
        outcome = [save.is_published, save.failure]
        dist.broadcast_object_list(outcome)  # from rank 0, which has the thread
        is_published, failure = outcome
        try:
            if failure:
                raise failed(save.writer.folder, failure)
            if not is_published:
                save.writer.collect()
                on_first_rank(self.mesh, save.writer.folder, save.publish)
        except RunFailed:  # on all ranks, after all of them have stopped writing
            self._remove(save)
            raise

    def _remove(self, save: PendingSave) -> None:
        if self.mesh.rank in self.folder_ranks:
            shutil.rmtree(save.writer.folder, ignore_errors=True)

    @phase("load:checkpoint")
    def load_newest(
        self, policy: MegatronModel, critic: MegatronModel | None = None, *, renames: bool = True
    ) -> Loaded:
        """Load the newest checkpoint that is not damaged.

        Damaged checkpoints that are newer are reported. With `renames`, they are also renamed, so that
        they do not count in `keep` and are not found again. Raises InputError if there is no undamaged
        checkpoint, or if the newest undamaged one is of another model.
        """
        listed = [manifest.candidates(self.root) if self.mesh.rank == 0 else None]
        dist.broadcast_object_list(listed)
        folders = listed[0] or []
        folder = manifest.newest_good(folders, partial(find_damage, self.mesh), self.warn)
        if folder is None:
            raise InputError(f"{self.root}: there is no checkpoint; start without one")
        loaded = self._load(folder, by_prefix(policy, critic))
        if renames and (damaged := folders[: folders.index(folder)]):
            on_first_rank(self.mesh, folder, lambda: self._set_aside(damaged, loaded.step))
        return loaded

    def _set_aside(self, damaged: list[Path], step: int) -> None:
        for folder in damaged:
            if folder.is_dir():
                aside = manifest.set_aside(folder)
                self.warn(f"checkpoint {folder.name} is kept as {aside.name}; you can delete it")
        manifest.point_to(self.root, step)

    @phase("load:checkpoint")
    def load(self, step: int, policy: MegatronModel, critic: MegatronModel | None = None) -> Loaded:
        """Load one checkpoint. Raises InputError if it is damaged or of another model."""
        folder = self.root / manifest.folder_name(step)
        advice = f"put an older step into {self.root / manifest.LATEST}"
        return self.load_folder(folder, policy, critic, advice=advice)

    @phase("load:checkpoint")
    def load_folder(
        self,
        folder: Path,
        policy: MegatronModel,
        critic: MegatronModel | None = None,
        *,
        with_optimizer: bool = True,
        advice: str = "take another",
    ) -> Loaded:
        """Load the checkpoint in `folder`. Without the optimizer, only the weights are loaded, and the
        optimizer need not be on the device. Raises InputError if the checkpoint is damaged (the
        message ends with `advice`) or of another model."""
        if reason := find_damage(self.mesh, folder):
            raise InputError(f"checkpoint {folder.name} is damaged: {reason}; {advice}")
        return self._load(folder, by_prefix(policy, critic), with_optimizer=with_optimizer)

    def _load(self, folder: Path, models: Models, *, with_optimizer: bool = True) -> Loaded:
        trained = {
            p for p, model in models.items() if with_optimizer and model.optimizer is not None
        }
        for prefix, model in models.items():
            (model.require_state if prefix in trained else model.require_parameters)()
        content = manifest.read_manifest(folder)
        same_layout = all(content[key] == value for key, value in self._layout().items())
        check_pickles(folder)
        saved = FileSystemReader(folder).read_metadata()
        shards = []
        states = {
            prefix: optimizer_shards(model.optimizer) if prefix in trained else {}
            for prefix, model in models.items()
        }
        for prefix, model in models.items():
            own, path = [], "critic.path" if prefix else "model.path"
            there, hf = content.get(f"{prefix}model"), model.weights.model
            reason = refusal(there, hf, model.adapter, path)
            if reason is None:
                own = state_shards(model.trained, states[prefix], saved_key(saved, prefix))
            unused = self._unused(own, saved, prefix)
            if reason is None and (difference := misfit(own, saved) or unused):
                reason = other_model(difference, path)
            if reason := first_reason(reason):
                raise InputError(f"checkpoint {folder} {reason}")
            shards += own
        random = None
        if same_layout and with_optimizer:
            size = tuple(saved.state_dict_metadata[self._random_key].size)  # pyright: ignore[reportAttributeAccessIssue]
            random = self._random_shard(torch.empty(size, dtype=torch.uint8))
            shards.append(random)
        self._fetch_files(folder, shards, saved)
        wanted: dict[str, Any] = {str(number): shard for number, shard in enumerate(shards)}
        common: Any = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
        for prefix, model in models.items():
            write_back(states[prefix])
            if prefix not in trained:
                continue
            set_step(model.optimizer, common[f"{prefix}adam_step"])
            model.scheduler.num_steps = 0  # loading adds to it
            model.scheduler.load_state_dict(common[f"{prefix}scheduler"])
        if not with_optimizer:
            return Loaded(content["step"], content["trainer"], same_layout)
        self.seed = common["seed"]
        if random is not None:
            assert random.data is not None
            restore_random_state(random.data, self.mesh.device)
        else:
            reseed(self.seed, content["step"])
        return Loaded(content["step"], content["trainer"], same_layout)

    def _needed_bytes(self, writer: ShardWriter, shards: list[ShardedTensor]) -> int:
        """Return the number of bytes that must be free on the checkpoint folder's disk."""
        return writer.count_bytes(shards)

    def _fetch_files(self, folder: Path, shards: list[ShardedTensor], saved: Metadata) -> None:
        """Fetch the files from which `shards` are read. Does nothing here, because the folder has
        all of them; `Snapshots` overrides it."""

    def _unused(self, shards: list[ShardedTensor], saved: Metadata, prefix: str) -> str | None:
        """Return an error message if the checkpoint has a parameter that the model has on no rank,
        and None otherwise. The message names the parameter."""
        names = parameter_names(saved, prefix)
        ours = {shard.key.partition(".")[2] for shard in shards}
        used = torch.tensor([name in ours for name in names], dtype=torch.uint8)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        left = [name for name, flag in zip(names, used.tolist(), strict=True) if not flag]
        return f"this model has no {left[0]}" if left else None

    def _layout(self) -> dict[str, Any]:
        return {
            "layout": dataclasses.asdict(self.mesh.dims),
            "device": self.mesh.device.type,
        }

    @property
    def _random_key(self) -> str:
        return f"random.rank_{self.mesh.rank:05d}"

    def _random_shard(self, data: torch.Tensor | None = None) -> ShardedTensor:
        packed = pack_random_state(self.mesh.device) if data is None else data
        shape = tuple(packed.shape)
        return ShardedTensor(self._random_key, packed, packed.dtype, shape, shape, (0,), None)

    def _content(self, step: int, models: Models, trainer: dict[str, Any]) -> dict[str, Any]:
        dtype = get_model_config(models[""].chunks[0]).params_dtype
        return {
            "step": step,
            **self._layout(),
            "versions": {
                "mrl": __version__,
                "torch": torch.__version__,
                "megatron-core": importlib.metadata.version("megatron-core"),
            },
            "dtype": str(dtype).removeprefix("torch."),
            **{
                f"{prefix}model": describe_model(model.weights.model, model.adapter)
                for prefix, model in models.items()
            },
            "trainer": trainer,
        }
