"""Pack this rank's samples into micro-batches, in which samples of the same prompt may share rows.

A row is what the model computes for one token. Shared rows are the rows of a common prefix, and are
computed only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from mrl.config import TrainConfig
from mrl.shared_prefixes import SharedPrefixes
from mrl.types import Sample, Statistics, Sum, TokenRoutes, TrainBatch
from parallel.dims import round_up
from parallel.megatron_model import MegatronModel
from parallel.mesh import Mesh
from parallel.prefix_packing import families_of, pack_families, with_common_rows
from parallel.reduce import reduce_statistics

LINEAR = "the state of linear attention passes through all tokens of a sequence"
"""Why nothing is shared in a model that has layers with linear attention."""


def shares_prefixes(
    config: TrainConfig, models: Sequence[MegatronModel], warn: Callable[[str], None]
) -> bool:
    """Return whether samples may share the rows of their common prefixes in passes of `models`.

    Calls `warn(text)` if the recipe asks for shared rows, but the layers of a model do not support
    them.
    """
    if config.share_prefixes == "off":
        return False
    if any(model.base.setup.model.sizes.has_linear_attention for model in models):
        warn(f"train.share_prefixes is auto, but {LINEAR}: nothing is shared; set it to off")
        return False
    if any(model.base.setup.model.architecture.num_trained_mtp for model in models):
        warn(
            "train.share_prefixes is auto, but MTP layers read the next token, which differs after a "
            "shared prefix: nothing is shared; set it to off"
        )
        return False
    if any(model.base.implementation == "transformer_engine" for model in models):
        warn(
            "train.share_prefixes is auto, but TransformerEngine's attention takes whole sequences: "
            "nothing is shared; set model.transformer_impl to local to share prefixes"
        )
        return False
    return True


def shared_tokens(batches: Sequence[TrainBatch], mesh: Mesh) -> dict[str, float]:
    """Return the metric `train/shared_tokens` of a step. A collective.

    It is the number of rows that are not computed, because they are shared with another sample. The
    sum is over all `batches` (the mini-batches of the step) and over all ranks.
    """
    found = [micro.shared for batch in batches for micro in batch.micro_batches]
    count = sum(shared.total for shared in found if shared is not None)
    own: Statistics = {"train/shared_tokens": Sum(torch.tensor(count))}
    return reduce_statistics(own if mesh.reports_loss else {})


class Packs(NamedTuple):
    """The micro-batches of an optimizer step on this rank."""

    micro_batches: list[tuple[list[int], SharedPrefixes | None]]
    """For each micro-batch, the numbers of its samples and the rows that these samples share. None
    instead of the rows if the samples share none."""
    longest: int
    """The number of rows in the longest micro-batch, without the padding at its end. `agreed_packs`
    replaces it by the maximum over all ranks."""


def unshared_packs(samples: Sequence[Sample], shares: list[list[list[int]]], mesh: Mesh) -> Packs:
    """Return this rank's micro-batches, in which every sample has its own rows.

    `shares` has the micro-batches of each data-parallel rank. A micro-batch is a list of indices into
    `samples`. In the result, `longest` is the maximum over all ranks.
    """
    multiple = mesh.dims.sequence_multiple
    longest = max(
        sum(round_up(len(samples[i].token_ids), multiple) for i in members)
        for share in shares
        for members in share
    )
    return Packs([(members, None) for members in shares[mesh.dp_rank]], longest)


def shared_packs(
    samples: Sequence[Sample],
    routes: Mapping[int, TokenRoutes],
    numbers: Sequence[int],
    mesh: Mesh,
    micro_batch_tokens: int,
) -> Packs:
    """Pack the samples that this rank trains so that samples of the same prompt share rows.

    All pipeline stages must call this together. samples: all samples of the optimizer step, with
    the tokens of this rank's samples. routes: the samples' routes in this rank's layers, by number.
    numbers: the numbers of the samples that this rank trains (indices into `samples`).
    """
    families = families_of(samples, numbers, mesh.dims.sequence_multiple)
    families = with_common_rows(families, samples, routes, mesh)
    packs = pack_families(families, micro_batch_tokens)
    longest = max((pack.num_rows for pack in packs), default=0)
    return Packs([(pack.members, pack.shared) for pack in packs], longest)


def agreed_packs(packs: list[Packs], mesh: Mesh) -> list[Packs]:
    """Return the `packs` of several optimizer steps, with the same number of micro-batches on all
    ranks. A collective.

    A rank that has fewer micro-batches than another rank gets additional empty ones. The field
    `longest` is set to its maximum over all ranks.
    """
    numbers = torch.tensor([(len(each.micro_batches), each.longest) for each in packs])
    numbers = numbers.to(mesh.device)
    if mesh.dims.world > 1:
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
    dims = mesh.dims
    found = []
    for each, (count, longest) in zip(packs, numbers.tolist(), strict=True):
        wanted = round_up(max(count, 1), dims.pp if dims.vpp > 1 else 1)
        empty = [([], None)] * (wanted - len(each.micro_batches))
        found.append(Packs([*each.micro_batches, *empty], longest))
    return found
