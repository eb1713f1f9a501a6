"""Join the ranks of a job and make their process groups.

A `Mesh` holds the groups, and is passed to the code that needs them.
"""

from __future__ import annotations

import datetime
import itertools
import os
import random
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mrl.errors import RankLost
from mrl.system.launcher import signal_arrived
from mrl.system.rendezvous import check_rendezvous
from mrl.system.torch_names import TORCH
from parallel import prepare
from parallel.dims import ParallelDims

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """This rank's process groups, one for each kind of parallelism.

    For the dense layers the ranks of a job form a grid of tp x cp x dp x pp. For the experts the
    tp x cp x dp ranks of a pipeline stage form another grid, of etp x ep x expert replicas.
    """

    dims: ParallelDims
    """The sizes of the dimensions of both grids."""
    rank: int
    """This rank's number in the job, from 0 to `dims.world` - 1."""
    device: torch.device
    """This rank's GPU, or the CPU."""
    tp: ProcessGroup
    """Tensor parallel: the ranks that split each dense layer's weights, and under sequence
    parallelism also the rows between the layers. All ranks of a group process the same samples."""
    pp: ProcessGroup
    """Pipeline parallel: one rank of each stage. The stages have different layers."""
    dp: ProcessGroup
    """Data parallel: replicas that process different samples. Ranks that split a sequence (`cp`)
    have the same samples, and are in different data-parallel groups."""
    cp: ProcessGroup
    """Context parallel: the ranks that split the tokens of each sequence."""
    ep: ProcessGroup
    """Expert parallel: the ranks that divide the experts of each MoE layer, and exchange tokens."""
    etp: ProcessGroup
    """Expert tensor parallel: the ranks that split each expert's weights."""

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
        """Whether this rank holds the losses of its data-parallel replica.

        Exactly one rank of each replica holds them, so that no number is counted twice.
        """
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0


def world_size() -> int:
    """Return the number of ranks that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device() -> torch.device:
    """Return this rank's device: its own GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


_joined: list[tuple[dist.Store, int]] = []
"""The pair (torchrun's store, number of this rank); empty before the first `join_store`."""
ARRIVED = "arrived"
"""The prefix of the keys `arrived_<rank>` in the store. A rank sets its key before it waits for the
other ranks."""
_num_joins = itertools.count(1)
"""An iterator that counts, from 1, how often this process has joined the other ranks."""


def join_store() -> tuple[dist.Store, int]:
    """Return (store, number of this rank). All ranks that the launcher started share the store,
    also those that do not train.

    Without a launcher, return a new local store and 0. Raises InputError if another program listens
    at the store's address.
    """
    if "RANK" not in os.environ:
        return dist.HashStore(), 0
    if not _joined:
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        # torchrun's agent, if there is one, already listens at the address.
        has_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if host and port.isdecimal() and not has_launcher:
            check_rendezvous(host, int(port))
        store, rank, _ = next(iter(dist.rendezvous("env://")))
        _joined.append((store, rank))
    return _joined[0]


def _empty_store() -> tuple[dist.Store, int]:
    """Return (an empty store that all ranks share, the number of this rank).

    A process may train several times. It uses another prefix of torchrun's store each time, because
    gloo would find the addresses that earlier process groups left there.
    """
    store, rank = join_store()
    return dist.PrefixStore(f"mrl_{next(_num_joins)}", store), rank


def init_mesh(dims: ParallelDims, seed: int, timeout_s: float = 1800.0) -> Mesh:
    """Join the other ranks, make Megatron's process groups, and seed the random generators.

    The ranks find each other through torchrun's rendezvous; without torchrun there is one rank.
    `timeout_s` is the longest time that a rank waits for the others in a collective of any group,
    including Megatron's groups. If some ranks do not connect within this time, raises a RankLost
    that names them.
    """
    prepare()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    device = local_device()
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, rank = _empty_store()
        timeout = datetime.timedelta(seconds=timeout_s)
        signal_arrived(rank)
        store.set(f"{ARRIVED}_{rank}", "")
        try:
            # Ranks above the world only lead engines and are in no process group.
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
        # Annotated as `int`, but Megatron passes it to timedelta.
        distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType]
    )
    _limit_all_groups(datetime.timedelta(seconds=timeout_s))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    state: Any = parallel_state  # its getters may return None, but these groups were just made
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
    """Return the ranks that have not connected yet; an empty list if the store cannot be
    reached."""
    with suppress(RuntimeError):  # the store is gone as well
        return [rank for rank in range(world) if not store.check([f"{ARRIVED}_{rank}"])]
    return []


def _limit_all_groups(timeout: datetime.timedelta) -> None:
    """Set the timeout of all groups. Megatron makes the experts' gloo group without a timeout."""
    set_timeout = TORCH.take("_set_pg_timeout")
    for group in list(TORCH.take("_world").pg_map):
        set_timeout(timeout, group)


def destroy_mesh() -> None:
    """Leave the process groups; do nothing if they were never joined."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def gather_objects(value: T) -> list[T]:
    """Gather the picklable `value` of every rank; return the values in rank order. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


MAX_SKEW_S = 5.0
"""The largest difference between clocks without a warning. Clocks that ntp or chrony synchronizes
differ by less than a tenth of a second."""


def compare_clocks() -> str:
    """Return a warning if the clocks of two nodes differ by more than MAX_SKEW_S, or else an empty
    string. A collective.

    Logs of several nodes are compared by their times. The ranks read their clocks right after a
    barrier, so the differences include its latency.
    """
    dist.barrier()
    return skew_in_words(gather_objects((socket.gethostname(), time.time())))


def skew_in_words(times: list[tuple[str, float]]) -> str:
    """Return a warning if the clocks of two hosts differ by more than MAX_SKEW_S seconds, or else an
    empty string. `times` are (host, seconds since 1970), read at the same moment."""
    (early, first), (late, last) = (pick(times, key=lambda pair: pair[1]) for pick in (min, max))
    if last - first <= MAX_SKEW_S or early == late:
        return ""
    return (
        f"the clock of {late} is {last - first:.0f} s ahead of that of {early}: times in logs and "
        "files of the two cannot be compared; look at timedatectl, and let chrony or ntp set both"
    )
