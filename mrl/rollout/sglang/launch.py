"""What the processes of one engine are started with, on each node that it spans.

SGLang has one process a node (`nnodes`, `node_rank`) with a scheduler for each of its ranks there. Node
0 answers requests; the schedulers of the others take part in what it does, over torch.distributed at
`dist_init_addr`, and answer nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config import ModelConfig, RolloutConfig
from mrl.config.adapter import AdapterLimits
from mrl.errors import InputError
from mrl.rollout.base import engine_seed
from mrl.rollout.sglang.adapter.limits import refuse_layout
from mrl.rollout.sglang.decode import (
    RouteShape,
    refuse_unfaithful,
    refuse_weights,
    route_shape,
)
from mrl.rollout.sglang.external_models import import_external_models
from mrl.rollout.sglang.settings import server_environment, server_settings


@dataclass(frozen=True)
class Launch:
    """A launch holds what stays the same at each start of an engine's process on one node."""

    hf_config: Any
    context_len: int
    shape: RouteShape | None
    """Shape of the routes; None where none are asked for."""
    settings: dict[str, Any]
    environment: dict[str, str]
    seed: int
    node_rank: int
    num_nodes: int

    @property
    def vocab_size(self) -> int:
        """The number of ids that the model has."""
        return self.hf_config.get_text_config().vocab_size

    def start_settings(self, num_starts: int, address: str) -> dict[str, Any]:
        """What is new at a start: fields of ServerArgs. `address` (host:port) is where nodes meet.

        The same seed on all nodes, whose ranks must draw the same tokens.
        """
        # A server in place of a lost one must not repeat its random numbers.
        settings: dict[str, Any] = {"random_seed": engine_seed(self.seed, num_starts)}
        if (self.num_nodes > 1) != bool(address):
            raise ValueError(f"start: got address {address!r} for {self.num_nodes} node(s)")
        if self.num_nodes > 1:
            settings |= {"nnodes": self.num_nodes, "node_rank": self.node_rank}
            settings["dist_init_addr"] = address
        return settings


def read_launch(
    model: ModelConfig,
    config: RolloutConfig,
    *,
    gpu_ids: Sequence[int | str],
    return_routes: bool,
    seed: int,
    first_version: int,
    keep_weights_on_host: bool,
    num_nodes: int = 1,
    node_rank: int = 0,
    adapters: AdapterLimits | None = None,
) -> Launch:
    """Raises InputError as `mrl.rollout.sglang.engine.Engine` does."""
    # Slow to import, and no other module of this room needs it.
    from transformers import AutoConfig

    ranks = config.tensor_parallel_size
    if ranks % num_nodes or (gpu_ids and len(gpu_ids) != ranks // num_nodes):
        raise InputError(
            f"rollout.tensor_parallel_size={ranks} on {num_nodes} node(s), and the engine was "
            f"given {len(gpu_ids)} GPUs ({list(gpu_ids)}) on this one; expected one a rank"
        )
    if not (Path(model.path) / "config.json").is_file():
        raise InputError(f"model.path {model.path}: no config.json there; give a folder of one")
    import_external_models()
    hf_config = AutoConfig.from_pretrained(model.path)
    refuse_unfaithful(hf_config, on_gpu=bool(gpu_ids), return_routes=return_routes)
    if adapters is not None:
        refuse_layout(config, adapters, num_nodes)
    weights = config.return_routing_weights
    if weights:
        refuse_weights(on_gpu=bool(gpu_ids), return_routes=return_routes)
    longest: int = hf_config.get_text_config().max_position_embeddings
    context_len = config.context_len or longest
    if context_len > longest:
        raise InputError(
            f"rollout.context_len {context_len} is above the model's max_position_embeddings {longest}"
        )
    settings = server_settings(
        model,
        config,
        on_gpu=bool(gpu_ids),
        context_len=context_len,
        return_routes=return_routes,
        first_version=first_version,
        keep_weights_on_host=keep_weights_on_host,
        adapters=adapters,
    )
    environment = server_environment(
        gpu_ids,
        ranks,
        first_rank=node_rank * (ranks // num_nodes),
        batch_invariant=config.true_on_policy or config.batch_invariant,
        return_routing_weights=weights,
        serves_adapter=adapters is not None,
    )
    shape = route_shape(hf_config, with_weights=weights) if return_routes else None
    return Launch(hf_config, context_len, shape, settings, environment, seed, node_rank, num_nodes)
