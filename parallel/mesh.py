"""This module makes the process groups of a rank once; they are passed on as a value, a `Mesh`."""

from __future__ import annotations

import datetime
import itertools
import os
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mrl.errors import RankLost
from mrl.system.launcher import signal_arrived
from mrl.system.rendezvous import check_rendezvous
from parallel import prepare
from parallel.dims import ParallelDims


@dataclass(frozen=True)
class Mesh:
    """A `Mesh` holds this rank's process groups, one per kind of parallelism.

    The ranks of a job are arranged in a grid of tp x cp x dp x pp for the dense layers; the experts
    arrange the tp x cp x dp ranks of a pipeline stage anew, in etp x ep x expert replicas.
    """

    dims: ParallelDims
    """The size of every dimension of the grid."""
    rank: int
    """This rank's number in the job, from 0 to `dims.world` - 1."""
    device: torch.device
    """This rank's GPU, or the CPU."""
    tp: ProcessGroup
    """Tensor parallel: ranks that share out each dense layer's weights, and under sequence parallelism
    the rows between the layers; all see the same samples."""
    pp: ProcessGroup
    """Pipeline parallel: one rank of each stage; every stage has other layers."""
    dp: ProcessGroup
    """Data parallel: replicas that see other samples. Ranks that share out a sequence (`cp`) see the
    same samples and are in different groups of this kind."""
    cp: ProcessGroup
    """Context parallel: ranks that share out the tokens of each sequence."""
    ep: ProcessGroup
    """Expert parallel: ranks that share out the experts of each MoE layer, and exchange tokens."""
    etp: ProcessGroup
    """Expert tensor parallel: ranks that share out each expert's weights."""

    @property
    def tp_rank(self) -> int:
        return self.tp.rank()

    @property
    def pp_rank(self) -> int:
        return self.pp.rank()

    @property
    def dp_rank(self) -> int:
        return self.dp.rank()

    @property
    def ep_rank(self) -> int:
        return self.ep.rank()

    @property
    def cp_rank(self) -> int:
        return self.cp.rank()

    @property
    def etp_rank(self) -> int:
        return self.etp.rank()

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.dims.pp - 1

    @property
    def reports_loss(self) -> bool:
        """Whether this rank holds the losses of its data-parallel replica. One rank of each does, so
        that no number is counted twice."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0


def world_size() -> int:
    """Return the number of ranks that torchrun started, or 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device() -> torch.device:
    """Return this rank's device: its own GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


_joined: list[tuple[dist.Store, int]] = []
"""torchrun's store and this rank, once it was joined."""
ARRIVED = "arrived"
"""The prefix of a key of the store, followed by a rank: the rank waits for the others there."""
_meetings = itertools.count(1)
"""The times that the ranks met there."""


def join_store() -> tuple[dist.Store, int]:
    """Return the store in which all ranks of the launcher meet, those that do not train too, and this
    rank. Raises InputError where another program listens there."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0
    if not _joined:
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        has_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it holds the port
        if host and port.isdecimal() and not has_launcher:
            check_rendezvous(host, int(port))
        store, rank, _ = next(iter(dist.rendezvous("env://")))
        _joined.append((store, rank))
    return _joined[0]


def _meeting() -> tuple[dist.Store, int]:
    """Return where the ranks meet, and this rank.

    A process may train several times. The ranks meet under another prefix each time: gloo would find
    the addresses that the groups of the last time left in torchrun's store.
    """
    store, rank = join_store()
    return dist.PrefixStore(f"mrl_{next(_meetings)}", store), rank


def init_mesh(dims: ParallelDims, seed: int, timeout_s: float = 1800.0) -> Mesh:
    """Join the other ranks (by torchrun's rendezvous, or alone), make Megatron's process groups, and
    seed the random generators.

    `timeout_s`: a rank that waits longer than this for the others in a collective gives up; this
    applies to all groups, Megatron's too. Raises RankLost with the ranks that have not connected by
    then.
    """
    prepare()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    device = local_device()
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, rank = _meeting()
        timeout = datetime.timedelta(seconds=timeout_s)
        signal_arrived(rank)
        store.set(f"{ARRIVED}_{rank}", "")
        try:
            # Higher ranks only lead engines, and are in no process group.
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=dims.world, timeout=timeout
            )
        except dist.DistStoreError as error:
            if missing := _not_arrived(store, dims.world):
                raise RankLost(
                    f"ranks {missing} have not connected to the other ranks in {timeout_s:g} s"
                ) from error
            raise
    parallel_state.initialize_model_parallel(
        dims.tp,
        dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
        context_parallel_size=dims.cp,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.etp,
        # Megatron makes a timedelta of it, and says `int`.
        distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType]
    )
    _limit_all_groups(datetime.timedelta(seconds=timeout_s))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    state: Any = parallel_state  # its getters say "or None", but these groups were just made
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=device.type == "cpu")
    return Mesh(
        dims=dims,
        rank=dist.get_rank(),
        device=device,
        tp=state.get_tensor_model_parallel_group(),
        pp=state.get_pipeline_model_parallel_group(),
        dp=state.get_data_parallel_group(),
        cp=state.get_context_parallel_group(),
        ep=state.get_expert_model_parallel_group(),
        etp=state.get_expert_tensor_parallel_group(),
    )


def _not_arrived(store: dist.Store, world: int) -> list[int]:
    """Return the ranks that have not connected yet."""
    with suppress(RuntimeError):  # the store is gone as well
        return [rank for rank in range(world) if not store.check([f"{ARRIVED}_{rank}"])]
    return []


def _limit_all_groups(timeout: datetime.timedelta) -> None:
    """Give the limit to the groups that Megatron makes without one: the experts' gloo group."""
    c10d: Any = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)


def destroy_mesh() -> None:
    """Leave the process groups; does nothing where they were never joined."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
