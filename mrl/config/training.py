"""Configures the trainer's side of a recipe: model, parallel layout, optimizer, MoE, checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from mrl.config.branch import Branch
from mrl.config.data import RowsConfig
from mrl.config.dtypes import Dtype


class ModelConfig(Branch):
    path: str
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer)."""
    architecture: str | None = None
    """The architecture of a model that mrl does not know: `file.py`, `file.py:NAME` or
    `package.module`; or a file of parallel/architectures/. Null finds it by the model_type."""
    dtype: Dtype = "auto"
    """`auto`: bfloat16 on GPUs, float32 on CPUs. `bf16` and `fp32` are names of the same. The rollout
    engine's too, unless `rollout.dtype` says otherwise."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """`auto`: TransformerEngine where it is installed and there is a GPU; the plan says which."""


class ParallelConfig(Branch):
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Above 1, sequence parallelism is on: Megatron requires it for MoE."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Pipeline stages: ranks that share out the layers."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Model chunks per pipeline rank (interleaved schedule)."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of a micro-batch: `train.micro_batch_tokens` is for all of them."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share out the experts of each MoE layer."""
    expert_tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share one expert; 1 gives every tensor-parallel rank whole experts."""
    decoder_first_pipeline_num_layers: int | None = Field(default=None, ge=1)
    """Layers of the first pipeline stage, where it should have fewer (or more) than the others."""
    decoder_last_pipeline_num_layers: int | None = Field(default=None, ge=1)
    """Layers of the last pipeline stage."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens travel to their experts. `allgather` pads all micro-batches to one length; `flex` is
    DeepEP, on GPUs where deep_ep is installed."""


class TrainConfig(Branch):
    num_steps: int = Field(default=0, ge=0)
    """Rollout steps of the whole run. Give this or `num_epochs`; where that is given, config.yaml has
    the steps that it came to."""
    num_epochs: float | None = Field(default=None, gt=0)
    """Passes over the data set, in the place of `num_steps`: as many rollout steps as it takes for each
    prompt to be sampled so many times."""
    num_steps_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps of a pass over a rollout (mini-batches)."""
    num_epochs_per_rollout: int = Field(default=1, ge=1)
    """Passes over the samples of a rollout (verl's `ppo_epochs`, TRL's `num_iterations`), each of
    `num_steps_per_rollout` optimizer steps. Old log-probs, advantages and routes are those from before
    the first of them."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Packed tokens per micro-batch; a longer single sample gets a micro-batch of its own."""
    recompute: bool = False
    """Full activation recompute: less memory, one more forward."""
    logprob_chunk_tokens: int = Field(default=1024, ge=0)
    """Loss tokens whose logits are held at a time: log-probs and entropy are computed from the hidden
    states in chunks of so many, and the backward computes a chunk's logits again. The memory is
    tokens of a chunk x vocabulary / tensor-parallel size x bytes of the dtype. A smaller chunk takes
    less of it; a larger one reads and writes the gradient of the vocabulary's weight less often. 0
    holds the logits of a whole micro-batch, prompts included, and saves the second product with the
    vocabulary's weight. The numbers are the same to rounding."""


class OptimizerConfig(Branch):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of Adam after the warm-up, from which it decays where `lr_decay_style` says so."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = (
        "constant"
    )
    """How the learning rate falls from `lr` to `min_lr` after the warm-up; Megatron's names and
    formulas. `WSD` (arXiv 2404.06395) keeps it constant until the last `wsd_decay_steps`. A critic
    decays in the same way."""
    lr_decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps, warm-up included, after which the learning rate is `min_lr`. Null takes all that
    the policy takes: (train.num_steps - critic.warmup_steps) x num_epochs_per_rollout x
    num_steps_per_rollout. Only with an `lr_decay_style`. The critic's decay ends in the same step."""
    min_lr: float = Field(default=0.0, ge=0)
    """The learning rate at the end of the decay. A critic ends at the same share of `critic.lr`."""
    wsd_decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the decay at the end of `WSD`, which must be given them."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """How the learning rate falls in them."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's second moment."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment that Adam divides by."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Global gradient norm; 0 turns clipping off."""
    use_distributed_optimizer: bool = False
    """Share the optimizer state (fp32 weights, moments) out over data-parallel ranks."""


class MoeConfig(Branch):
    routing_replay: Literal["off", "r2", "r3"] = "r3"
    """r3: replay the rollout's routes; r2: replay the trainer's own pre-update routes; off."""
    replay: Literal["ids", "ids_order", "ids_weights", "ids_order_weights"] = "ids"
    """What is replayed. ids: which experts, whose outputs the trainer weighs by its own present scores.
    order: they are added in the order of the route, as the engine does, and not by their numbers.
    weights: with the recorded gate weights, the gradient passed through to the router; under r3 these
    need `rollout.return_routing_weights`."""
    load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """Off under RL: a balancing loss pulls the router away from what the reward asks for. The load is
    evened out over each micro-batch (`aux_loss`, which so depends on how samples are packed), each
    sequence (`seq_aux_loss`, which does not) or all ranks and what the step has seen so far
    (`global_aux_loss`). Choices are those that the router would make now, also under replay."""
    aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss, a mean over the tokens of the step (padding and samples
    without a loss excluded), summed over layers; needs a `load_balancing_type`."""
    z_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss (arXiv 2202.08906 eq. 5), the same kind of mean."""
    expert_bias_update_rate: float = Field(default=0.0, ge=0)
    """Step of the aux-loss-free balancing bias (arXiv 2408.15664), for models whose router has one; 0
    keeps the bias as it was loaded."""

    @field_validator("routing_replay", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 reads a bare `off` as false


class SftConfig(RowsConfig):
    """Supervised steps before the first rollout, on rows with a `completion`, or with `messages` whose
    last is an assistant's."""

    num_steps: int = Field(ge=1)
    """Optimizer steps of the supervised training."""
    batch_size: int = Field(ge=1)
    """Rows of the file in each of these steps."""
    lr: float = Field(gt=0)
    """Learning rate of these steps; the RL starts with a fresh optimizer."""


class CheckpointConfig(Branch):
    save_every: int = Field(default=50, ge=0)
    """Steps between checkpoints, beside the last step; 0 saves only that."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    stop_limit_s: float = Field(default=25.0, gt=0)
    """Seconds that SIGTERM and SIGHUP leave to end the step and save it. After them the process ends,
    and what was trained since the last checkpoint is lost. SLURM and Kubernetes kill after 30 s.
    SIGUSR1 has no limit."""
    async_save: bool = True
    """Write in the background while training continues; the step only waits for the copy to the
    host."""
    snapshot_every: int = Field(default=0, ge=0)
    """Steps between snapshots: checkpoints in the memory of the nodes, which a restart after a lost
    rank continues from; 0 takes none. The newest one is kept, and removed when the run is done."""
    snapshot_folder: str | None = None
    """Folder of each node for its snapshots; null takes /dev/shm. It has to hold four times what a
    node's ranks save on several nodes (two snapshots, and a neighbour's copies), twice on one node."""
