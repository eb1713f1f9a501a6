"""What runs on the layout: the numbers of a recipe that its cost depends on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from mrl.config import Recipe
from parallel.dims import ParallelDims
from parallel.scaling.shape import ModelShape
from parallel.scaling.state import StateOptions, read_state


@dataclass(frozen=True)
class Workload:
    """A step has `prompts` x `samples` sequences and trains on them in `optimizer_steps` parts."""

    prompts: int
    samples: int
    prompt_len: int
    """Tokens; an assumption, as prompts differ."""
    response_len: int
    """Tokens; the recipe's limit, so every figure is that of the longest responses."""
    optimizer_steps: int = 1
    micro_batch_tokens: int = 4096
    recompute: bool = False
    """Every layer from its input."""
    recompute_modules: tuple[str, ...] = ()
    """Megatron's selective recompute: modules whose outputs are computed again in the backward."""
    logprob_chunk_tokens: int = 0
    """Tokens whose logits exist at one time; 0: those of the whole micro-batch."""
    state: StateOptions = field(default_factory=StateOptions)
    async_save: bool = False
    distributed_optimizer: bool = False
    weight_bytes: int = 2
    """Bytes of a weight and of an activation: 2 for bfloat16, 4 for float32."""
    native: bool = False
    """mrl's own layers in the place of TransformerEngine's; adapters are built into these only."""
    lora: Literal["adapter", "merged"] | None = None
    """What a sync sends of an adapted model: the adapter, or the whole model with it merged in."""
    adapter_slots: int = 3
    """Adapters that an engine has room for on the device: the newest version, one that is still in
    flight, and the base, which takes one too."""
    routing_replay: Literal["off", "r2", "r3"] = "r3"
    reference: bool = False
    """A reference model: two more copies of the weights on the host, one more forward pass."""
    engine_tp: int = 1
    """Ranks of one engine."""
    engine_ep: int = 1
    """How many of these share the experts as wholes; the others share each expert's columns."""
    engine_dp: int = 1
    """Replicas of the attention inside an engine (DP attention)."""
    max_running_requests: int | None = None
    engine_share: float = 0.6
    """Share of the device's memory for the engine's weights and KV cache (mem_fraction_static)."""
    rollout_ranks: int = 0
    """Ranks that lead engines only, behind those of the layout; 0: every rank trains and generates."""
    max_staleness: int = 0
    """Steps that these engines generate ahead."""
    staged_versions: int = 0
    """Versions of the weights in the host's memory, for each of these engines."""
    bucket_bytes: int = 256 << 20
    exact_pinned: int | None = None
    """Bytes above which torch does not round a pinned buffer up to a power of two
    (`PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:N`); None: it rounds all of them."""

    def sent_bytes(self, shape: ModelShape) -> int:
        """Count what a weight sync sends: the whole model, or its adapter."""
        if shape.adapter and self.lora == "adapter":
            return self.weight_bytes * shape.adapter.num_parameters
        return self.weight_bytes * shape.num_parameters

    @property
    def sequence_len(self) -> int:
        return self.prompt_len + self.response_len

    @property
    def num_sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def num_tokens(self) -> int:
        """Tokens of one step, over all ranks."""
        return self.num_sequences * self.sequence_len

    def num_engine_ranks(self, dims: ParallelDims) -> int:
        """Count the ranks that engines span."""
        return self.rollout_ranks or dims.world

    def num_engines(self, dims: ParallelDims) -> int:
        return max(1, self.num_engine_ranks(dims) // self.engine_tp)

    def packed_tokens(self, dims: ParallelDims) -> int:
        """Return N of one micro-batch: whole sequences up to the budget, padded for the layout."""
        each = round_up(self.sequence_len, dims.sequence_multiple)
        return round_up(self.sequences_per_pack(dims) * each, dims.token_multiple)

    def sequences_per_pack(self, dims: ParallelDims) -> int:
        """Sequences of one micro-batch; each is padded to whole chunks for context parallelism."""
        each = round_up(self.sequence_len, dims.sequence_multiple)
        return max(1, self.micro_batch_tokens // each)

    def num_micro_batches(self, dims: ParallelDims) -> int:
        """Count the micro-batches of one optimizer step on one data-parallel rank
        (`parallel.packing.assign_micro_batches`)."""
        share = -(-self.num_sequences // (self.optimizer_steps * dims.dp))
        count = -(-share // self.sequences_per_pack(dims))
        return round_up(count, dims.pp) if dims.vpp > 1 else count


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def recipe_workload(
    recipe: Recipe, shape: ModelShape, prompt_len: int, exact_pinned: int | None = None
) -> Workload:
    """Return what a recipe does with the model of `shape`, in the units of the plan. `auto` means
    bfloat16: the plan is for GPUs."""
    megatron = recipe.megatron
    weight_bytes = 4 if recipe.model.dtype == "float32" else 2
    selective = megatron.get("recompute_granularity") == "selective"
    modules = megatron.get("recompute_modules") or ["core_attn"]
    apart, ahead = recipe.rollout.placement == "disaggregated", recipe.asynchronous
    work = Workload(
        prompts=recipe.rollout.prompts_per_step,
        samples=recipe.rollout.samples_per_prompt,
        prompt_len=prompt_len,
        response_len=recipe.rollout.max_response_len,
        optimizer_steps=recipe.train.num_steps_per_rollout * recipe.train.num_epochs_per_rollout,
        micro_batch_tokens=recipe.train.micro_batch_tokens,
        recompute=recipe.train.recompute,
        recompute_modules=tuple(modules) if selective else (),
        logprob_chunk_tokens=recipe.train.logprob_chunk_tokens,
        state=read_state(megatron, weight_bytes),
        async_save=recipe.checkpoint.async_save,
        distributed_optimizer=recipe.optimizer.use_distributed_optimizer,
        weight_bytes=weight_bytes,
        routing_replay=recipe.moe.routing_replay,
        reference=recipe.algorithm.kl_coef > 0,
        engine_tp=recipe.rollout.tensor_parallel_size,
        engine_ep=recipe.rollout.expert_parallel_size,
        engine_dp=recipe.rollout.data_parallel_attention_size,
        max_running_requests=recipe.rollout.max_running_requests,
        engine_share=recipe.rollout.mem_fraction_static,
        rollout_ranks=(recipe.rollout.num_ranks or 0) if apart else 0,
        max_staleness=ahead.max_staleness if apart else 0,
        staged_versions=ahead.staged_versions if apart else 0,
        native=recipe.lora is not None or recipe.model.transformer_impl == "local",
        lora=recipe.lora.rollout if recipe.lora else None,
        exact_pinned=exact_pinned,
    )
    bucket_bytes = recipe.rollout.weight_bucket_bytes(work.sent_bytes(shape))
    return dataclasses.replace(work, bucket_bytes=bucket_bytes)
