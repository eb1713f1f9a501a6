"""The settings with which the processes of one engine start, on each node that the engine spans.

SGLang has one process on each node (`nnodes`, `node_rank`), with one scheduler for each of the engine's
ranks on that node. Only node 0 answers requests. The schedulers of all nodes compute together over
torch.distributed, and meet at `dist_init_addr`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config import RolloutConfig
from mrl.config.adapter import AdapterLimits
from mrl.engines.base import EngineConfig, engine_seed
from mrl.engines.sglang.adapter.limits import refuse_layout
from mrl.engines.sglang.decode import RouteShape, refuse_weights, route_shape
from mrl.engines.sglang.external_models import import_external_models
from mrl.engines.sglang.quantized import check_quantization, dequantized_settings
from mrl.engines.sglang.settings import model_settings, server_environment, server_settings
from mrl.engines.sglang.unfaithful import refuse_unfaithful
from mrl.errors import InputError


@dataclass(frozen=True)
class Launch:
    """The settings of one process of an engine, as far as they are the same at each start. An engine
    has one process on each node."""

    config: EngineConfig
    hf_config: Any
    context_len: int
    shape: RouteShape | None
    """Shape of the routes; None if the engine returns no routes."""
    settings: dict[str, Any]
    """Values of fields of SGLang's ServerArgs, by the name of the field."""
    environment: dict[str, str]
    adapters: AdapterLimits | None
    """Limits of the adapters that the engine can serve; None if updates load all weights."""
    node_rank: int

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the model."""
        return self.hf_config.get_text_config().vocab_size

    def start_settings(self, num_starts: int, address: str) -> dict[str, Any]:
        """Return the fields of ServerArgs that differ at each start. `address` (host:port) is where the
        processes of an engine that spans nodes meet; it is empty for an engine on one node."""
        # A new server must not repeat the random numbers of a lost one. All nodes get the same seed,
        # because their ranks must draw the same tokens.
        settings: dict[str, Any] = {"random_seed": engine_seed(self.config.seed, num_starts)}
        num_nodes = self.config.num_nodes
        if (num_nodes > 1) != bool(address):
            raise ValueError(f"start: got address {address!r} for {num_nodes} node(s)")
        if num_nodes > 1:
            settings |= {"nnodes": num_nodes, "node_rank": self.node_rank}
            settings["dist_init_addr"] = address
        return settings


def read_launch(
    config: EngineConfig, *, node_rank: int = 0, adapters: AdapterLimits | None = None
) -> Launch:
    """Read the model's configuration, and check that SGLang can run the model. If the engine serves
    several adapters, `adapters` has their common limits; it is not used if `config.adapter` is set.

    Raises InputError in the same cases as `mrl.engines.sglang.server.SGLangServer`.
    """
    rollout, gpu_ids, num_nodes = config.rollout, config.gpu_ids, config.num_nodes
    ranks = rollout.tensor_parallel_size
    if ranks % num_nodes or (gpu_ids and len(gpu_ids) != ranks // num_nodes):
        raise InputError(
            f"rollout.tensor_parallel_size={ranks} on {num_nodes} node(s), and the engine was "
            f"given {len(gpu_ids)} GPUs ({list(gpu_ids)}) on this one; expected one a rank"
        )
    hf_config = _read_hf_config(config.model.path)
    on_gpu, return_routes = bool(gpu_ids), config.return_routes
    refuse_unfaithful(hf_config, on_gpu=on_gpu, return_routes=return_routes, num_ranks=ranks)
    if config.adapter is not None:
        adapters = AdapterLimits.around([config.adapter])
    if adapters is not None:
        refuse_layout(rollout, adapters, num_nodes, on_gpu=on_gpu)
    check_quantization(hf_config, rollout, rollout.weight_sync, on_gpu=on_gpu)
    weights = rollout.return_routing_weights
    if weights:
        refuse_weights(on_gpu=on_gpu, return_routes=return_routes)
    context_len = _context_len(rollout, hf_config)
    settings = server_settings(config, context_len, adapters)
    settings |= model_settings(hf_config.model_type, rollout.server_args, on_gpu=on_gpu)
    if not on_gpu:
        settings |= dequantized_settings(hf_config, rollout.server_args)
    environment = server_environment(
        gpu_ids,
        ranks,
        first_rank=node_rank * (ranks // num_nodes),
        batch_invariant=rollout.true_on_policy or rollout.batch_invariant,
        return_routing_weights=weights,
        serves_adapter=adapters is not None,
        quantization=rollout.quantization,
        cpu_threads=config.cpu_threads,
        model_type=hf_config.model_type,
    )
    return Launch(
        config=config,
        hf_config=hf_config,
        context_len=context_len,
        shape=route_shape(hf_config, with_weights=weights) if return_routes else None,
        settings=settings,
        environment=environment,
        adapters=adapters,
        node_rank=node_rank,
    )


def _read_hf_config(model_path: str) -> Any:
    # Slow to import, and nothing else in this module needs it.
    from transformers import AutoConfig

    if not (Path(model_path) / "config.json").is_file():
        raise InputError(f"model.path {model_path}: no config.json there; give a folder of one")
    import_external_models()
    return AutoConfig.from_pretrained(model_path)


def _context_len(rollout: RolloutConfig, hf_config: Any) -> int:
    longest: int = hf_config.get_text_config().max_position_embeddings
    context_len = rollout.context_len or longest
    if context_len > longest:
        raise InputError(
            f"rollout.context_len {context_len} is above the model's max_position_embeddings {longest}"
        )
    return context_len
