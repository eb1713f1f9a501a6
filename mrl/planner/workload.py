"""The settings of a recipe that determine the cost of a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from mrl.algorithms import load_algorithm
from mrl.algorithms.logprob_pass import needs_logprob_pass, update_can_serve
from mrl.config import Recipe
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage, indexer_norm_bytes
from mrl.planner.state import Shard, StateOptions, optimizer_shard, read_state
from parallel.dims import ParallelDims, round_up


@dataclass(frozen=True)
class Workload:
    """The work of one step, which generates `prompts` x `samples` sequences and trains on them."""

    prompts: int
    samples: int
    """Number of samples per prompt."""
    prompt_len: int
    """Number of tokens of every prompt. This is an assumption, because prompts differ in length."""
    response_len: int
    """Number of tokens of every response. It is the recipe's limit, so the plan is for the longest
    responses."""
    optimizer_steps: int = 1
    """Number of optimizer steps per step of the run. Each of them trains on an equal share of the
    sequences."""
    micro_batch_tokens: int = 4096
    recompute: bool = False
    """Whether the backward pass recomputes every layer from its input."""
    recompute_modules: tuple[str, ...] = ()
    """Modules that Megatron's selective recompute computes again in the backward pass."""
    logprob_chunk_tokens: int = 0
    """Number of tokens whose logits exist at the same time; 0 for all tokens of the micro-batch."""
    state: StateOptions = field(default_factory=StateOptions)
    async_save: bool = False
    distributed_optimizer: bool = False
    weight_bytes: int = 2
    """Bytes of a weight and of an activation: 2 for bfloat16, 4 for float32."""
    native: bool = False
    """Whether mrl's own layers replace TransformerEngine's. Adapters require them."""
    lora: Literal["adapter", "merged"] | None = None
    """What a weight sync sends of an adapted model: only the adapter, or the merged weights. None for
    a model without an adapter."""
    adapter_slots: int = 3
    """Number of adapter slots on an engine's device: for the newest version, for an older one that
    requests still use, and for the base model."""
    routing_replay: Literal["off", "r2", "r3"] = "r3"
    reference: bool = False
    """Whether there is a reference model. It needs two more copies of the weights on the host and
    one more forward pass."""
    logprob_pass: bool = True
    """Whether the policy's log-probs are computed in a separate pass before the update. If not, the
    update's own forward pass gives the old log-probs."""
    engine_tp: int = 1
    """Number of ranks of one engine."""
    engine_ep: int = 1
    """Expert-parallel size inside an engine. The columns of each expert are split over the
    engine_tp / engine_ep ranks that hold it."""
    engine_dp: int = 1
    """Number of replicas of the attention inside an engine (DP attention)."""
    max_running_requests: int | None = None
    engine_share: float = 0.6
    """Share of the device's memory for the engine's weights and KV cache (mem_fraction_static)."""
    rollout_ranks: int = 0
    """Number of ranks that only generate. They are numbered after the ranks that train. 0 in a
    colocated run, in which every rank trains and generates."""
    max_staleness: int = 0
    """Number of steps that engines may generate ahead of the newest weights; 0 in a colocated run."""
    staged_versions: int = 0
    """Number of versions of the weights that each engine's worker keeps in host memory; 0 in a
    colocated run."""
    full_sync_every: int = 1
    """Every n-th version of the weights is sent whole, and the others as deltas; 1 sends all whole."""
    bucket_bytes: int = 256 << 20
    """Bytes of one bucket of a weight sync."""
    exact_pinned: int | None = None
    """Bytes above which torch does not round a pinned buffer up to a power of two
    (`PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:N`); None if it rounds all of them."""

    quantized: bool = False
    """Whether engines hold quantised weights (`rollout.quantization`)."""
    decomposes: bool = False
    """Whether the mismatch is decomposed in some steps (`diagnosis.decompose_every`)."""
    share_prefixes: bool = False
    """Whether samples may share prefixes (`train.share_prefixes`, and mrl's own layers)."""

    def sent_bytes(self, shape: ModelShape) -> int:
        """Return the bytes that a weight sync exports: the whole model, or only its adapter."""
        if shape.adapter and self.lora == "adapter":
            return self.weight_bytes * shape.adapter.num_parameters
        norms = indexer_norm_bytes(shape, shape.num_layers, self.weight_bytes)
        return self.weight_bytes * shape.num_parameters + norms

    def encoded_bytes(self, shape: ModelShape) -> int:
        """Return the bytes that a weight sync sends to an engine, after quantising."""
        matrices = shape.num_quantized if self.quantized else 0
        return self.exact_bytes(shape) + quantized_bytes(matrices)

    def exact_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of what a weight sync sends to an engine and does not quantise."""
        matrices = shape.num_quantized if self.quantized else 0
        return self.sent_bytes(shape) - matrices * self.weight_bytes

    @property
    def divides_ranges(self) -> bool:
        """Whether Megatron's distributed optimizer shards flattened buffers. With Muon, ranks divide
        whole parameters instead."""
        return self.distributed_optimizer and not self.state.muon

    def optimizer_shard(self, stage: Stage, dims: ParallelDims) -> Shard:
        """Return the number of elements whose optimizer state one rank of the stage keeps."""
        distributed, muon = self.distributed_optimizer, self.state.muon
        return optimizer_shard(stage, dims, distributed, self.weight_bytes, muon=muon)

    @property
    def sequence_len(self) -> int:
        return self.prompt_len + self.response_len

    @property
    def num_sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one step, summed over all ranks."""
        return self.num_sequences * self.sequence_len

    @property
    def attention_ranks(self) -> int:
        """Number of ranks over which an engine shards one replica of the attention."""
        return self.engine_tp // self.engine_dp

    def num_engine_ranks(self, dims: ParallelDims) -> int:
        """Return the number of ranks that run engines."""
        return self.rollout_ranks or dims.world

    def num_engines(self, dims: ParallelDims) -> int:
        return max(1, self.num_engine_ranks(dims) // self.engine_tp)

    def packed_tokens(self, dims: ParallelDims) -> int:
        """Return N, the number of tokens in a micro-batch that holds as many sequences as fit.

        The padding of the sequences and of the micro-batch is included.
        """
        each = round_up(self.sequence_len, dims.sequence_multiple)
        return round_up(self.sequences_per_pack(dims) * each, dims.token_multiple)

    def sequences_per_pack(self, dims: ParallelDims) -> int:
        """Return the number of sequences in one micro-batch, each padded for context parallelism."""
        each = round_up(self.sequence_len, dims.sequence_multiple)
        return max(1, self.micro_batch_tokens // each)

    def num_micro_batches(self, dims: ParallelDims) -> int:
        """Return the number of micro-batches of one optimizer step on one data-parallel rank.

        The trainer assigns sequences with `parallel.packing.assign_micro_batches`.
        """
        share = -(-self.num_sequences // (self.optimizer_steps * dims.dp))
        count = -(-share // self.sequences_per_pack(dims))
        return round_up(count, dims.pp) if dims.vpp > 1 else count


def quantized_bytes(num_weights: int) -> int:
    """Return the bytes of weights with one byte each, and a float32 scale for each 128 x 128 block."""
    return num_weights + -(-num_weights // 128**2) * 4


def recipe_workload(
    recipe: Recipe, shape: ModelShape, prompt_len: int, exact_pinned: int | None = None
) -> Workload:
    """Return the workload of a recipe that trains the model of `shape`.

    `model.dtype: auto` counts as bfloat16, because the plan is for GPUs. `exact_pinned` is
    `Workload.exact_pinned`.
    """
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
        state=read_state(megatron, weight_bytes, muon=recipe.optimizer.name == "muon"),
        async_save=recipe.checkpoint.async_save,
        distributed_optimizer=recipe.optimizer.use_distributed_optimizer,
        weight_bytes=weight_bytes,
        routing_replay=recipe.moe.routing_replay,
        reference=recipe.algorithm.kl_coef > 0,
        logprob_pass=needs_logprob_pass(
            recipe, load_algorithm(recipe.algorithm.name), update_serves=update_can_serve(recipe)
        ),
        engine_tp=recipe.rollout.tensor_parallel_size,
        engine_ep=recipe.rollout.expert_parallel_size,
        engine_dp=recipe.rollout.data_parallel_attention_size,
        max_running_requests=recipe.rollout.max_running_requests,
        engine_share=recipe.rollout.mem_fraction_static,
        rollout_ranks=(recipe.rollout.num_ranks or 0) if apart else 0,
        max_staleness=ahead.max_staleness if apart else 0,
        staged_versions=ahead.staged_versions if apart else 0,
        full_sync_every=1 + recipe.rollout.max_deltas if apart else 1,
        native=recipe.lora is not None or recipe.model.transformer_impl == "local",
        lora=recipe.lora.rollout if recipe.lora else None,
        exact_pinned=exact_pinned,
        quantized=recipe.rollout.quantization != "none",
        decomposes=recipe.diagnosis.decompose_every > 0,
    )
    work = dataclasses.replace(
        work,
        share_prefixes=work.native
        and recipe.train.share_prefixes == "auto"
        and shape.linear is None
        and not shape.num_mtp,
    )
    bucket_bytes = recipe.rollout.weight_bucket_bytes(work.sent_bytes(shape))
    return dataclasses.replace(work, bucket_bytes=bucket_bytes)
