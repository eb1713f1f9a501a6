"""Times the layout of a save with a large model's keys: a part of `python -m benchmarks.world_step`."""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.planner import WriteItem

from mrl.planner.shape import ModelShape
from parallel.checkpoint.shard_writer import (
    ShardedTensor,
    ShardWriter,
    check_coverage,
    joined_metadata,
)

KINDS = ("model", "main", "exp_avg", "exp_avg_sq")


def key_names(shape: ModelShape) -> list[str]:
    """Names like those of a checkpoint's keys: two weights an expert, about ten others a layer."""
    experts = [
        f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc{k}.weight"
        for layer in shape.moe_layers
        for expert in range(shape.num_experts)
        for k in (1, 2)
    ]
    others = [f"decoder.layers.{n}.other_{i}" for n in range(shape.num_layers) for i in range(10)]
    return [f"{kind}.{name}" for kind in KINDS for name in (*experts, *others)]


def lay_out_checkpoint(shape: ModelShape, world: int, folder: Path) -> dict[str, Any]:
    """Time what each rank lays out for itself (`now`) and what rank 0 laid out for all (`before`), with
    one rectangle per key. `before` leaves out that rank 0 had to unpickle the others' shares."""
    names, size = key_names(shape), (shape.hidden, shape.moe_ffn)
    data = torch.empty(size, device="meta")
    shards = [ShardedTensor(n, data, data.dtype, size, size, (0, 0), None) for n in names[::world]]
    start = time.process_time()
    request = ShardWriter(folder / "save", 0, world).request(shards, copy=False)
    own_s = time.process_time() - start
    share: SavePlan = request.async_fn_args[2]
    (item,) = share.items[:1]
    shares = [
        replace(
            share, items=[replace(item, index=replace(item.index, fqn=n)) for n in names[r::world]]
        )
        for r in range(world)
    ]
    sent = [pickle.dumps(each) for each in shares]
    reports = [json.dumps([as_item(item) for item in each.items]) for each in shares]
    start = time.process_time()
    ready, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(shares)
    check_coverage(metadata)
    for each in ready:
        pickle.dumps(each)
    before_s = time.process_time() - start
    start = time.process_time()
    joined = joined_metadata([json.loads(report) for report in reports])
    joined_s = time.process_time() - start
    assert joined.state_dict_metadata == metadata.state_dict_metadata
    return {
        "keys": len(names),
        "now": {
            "every_rank_plans_s": own_s,
            "rank_0_after_the_writing_s": joined_s,
            "rank_0_receives": sum(map(len, reports)),
        },
        "before": {
            "all_ranks_wait_for_rank_0_s": before_s,
            "rank_0_receives_and_sends": 2 * sum(map(len, sent)),
            "every_rank_receives_reports": max(map(len, reports)) * world,
        },
    }


def as_item(item: WriteItem) -> list[Any]:
    """Return the item as a rank reports it (`parallel.checkpoint.shard_writer.Item`)."""
    tensor = item.tensor_data
    assert tensor is not None
    where = [item.index.fqn, list(tensor.chunk.offsets), 1 << 20, "__0_0.distcp", 1 << 30, 1 << 20]
    return [*where, list(tensor.chunk.sizes), list(tensor.size), str(tensor.properties.dtype)]
