"""Configuration of the trainer: model, parallel layout, optimizer, MoE, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mrl.config.branch import Branch
from mrl.config.data import RowsConfig
from mrl.config.dtypes import Dtype


class ModelConfig(Branch):
    path: str
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer)."""
    architecture: str | None = None
    """The architecture of a model that mrl does not know: `file.py`, `file.py:NAME`,
    `package.module`, or a file of parallel/architectures/. Null finds the architecture by the
    model_type in config.json."""
    dtype: Dtype = "auto"
    """Dtype of the trainer, and of the rollout engine unless `rollout.dtype` is set. `auto` is
    bfloat16 on GPUs and float32 on CPUs. `bf16` and `fp32` are short names."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """`auto` takes TransformerEngine if it is installed and there is a GPU, and otherwise mrl's own
    layers (`local`). `mrl check` shows the choice."""


class ParallelConfig(Branch):
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Tensor-parallel ranks. Above 1, sequence parallelism is on, because Megatron requires it for
    MoE."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Pipeline stages: ranks among which the layers are divided."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Model chunks per pipeline rank (interleaved schedule)."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks among which the tokens of a micro-batch are divided; `train.micro_batch_tokens` counts
    the tokens of all these ranks together."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks among which the experts of each MoE layer are divided."""
    expert_tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that split one expert; with 1 every tensor-parallel rank has complete experts."""
    decoder_first_pipeline_num_layers: int | None = Field(default=None, ge=1)
    """Layers of the first pipeline stage, if their number should differ from the other stages."""
    decoder_last_pipeline_num_layers: int | None = Field(default=None, ge=1)
    """Layers of the last pipeline stage, if their number should differ from the other stages."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens are sent to their experts. `allgather` pads all micro-batches to one length;
    `flex` is DeepEP, on GPUs where deep_ep is installed."""


class TrainConfig(Branch):
    num_steps: int = Field(default=0, ge=0)
    """Rollout steps of the whole run. Give this or `num_epochs`; with `num_epochs`, config.yaml
    contains the resulting number of steps."""
    num_epochs: float | None = Field(default=None, gt=0)
    """Passes over the data set, instead of `num_steps`: the run has as many rollout steps as it
    takes to sample each prompt this many times."""
    cpu_threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Threads of each trainer rank and engine on CPUs, at most 1024. `auto`: OMP_NUM_THREADS if it is
    set, else the cores of the machine divided by its ranks, or one for a model with a hidden size
    below 512. The number of threads changes the order of sums."""
    num_steps_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps (mini-batches) per pass over a rollout."""
    num_epochs_per_rollout: int = Field(default=1, ge=1)
    """Passes over the samples of a rollout (verl's `ppo_epochs`, TRL's `num_iterations`), each with
    `num_steps_per_rollout` optimizer steps. All passes use the old log-probs, advantages and routes
    from before the first pass."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Packed tokens per micro-batch. A single longer sample gets a micro-batch of its own."""
    recompute: bool = False
    """Recompute all activations in the backward pass, which saves memory and costs one more forward
    pass."""
    logprob_chunk_tokens: int = Field(default=1024, ge=0)
    """Number of loss tokens whose logits are in memory at a time: log-probs and entropy are
    computed from the hidden states in chunks of this size, and the backward pass computes the
    logits of a chunk again. The memory is chunk tokens x vocabulary / tensor-parallel size x bytes
    of the dtype. A smaller chunk needs less memory; a larger one reads and writes the gradient of
    the output layer's weight less often. 0 computes the logits of a whole micro-batch at once,
    prompts included, and saves the second product with the output layer's weight. The results are
    equal up to rounding."""


class OptimizerConfig(Branch):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of Adam after the warm-up; it then decays according to `lr_decay_style`."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = (
        "constant"
    )
    """How the learning rate falls from `lr` to `min_lr` after the warm-up, with Megatron's names
    and formulas. `WSD` (arXiv 2404.06395) keeps the learning rate constant until the last
    `wsd_decay_steps`. A critic's learning rate decays in the same way."""
    lr_decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps, including the warm-up, after which the learning rate is `min_lr`; only with
    an `lr_decay_style` other than `constant`. Null takes all optimizer steps of the policy:
    `(train.num_steps - critic.warmup_steps) x num_epochs_per_rollout x num_steps_per_rollout`. The
    critic's decay ends at the same step."""
    min_lr: float = Field(default=0.0, ge=0)
    """The learning rate at the end of the decay. A critic ends at the same fraction of `critic.lr`."""
    wsd_decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the decay at the end of `WSD`, which requires this key."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """How the learning rate falls during the last `wsd_decay_steps` steps of `WSD`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's second moment."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment that Adam divides by."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0 turns clipping off."""
    use_distributed_optimizer: bool = False
    """Divide the optimizer state (fp32 weights, moments) among the data-parallel ranks."""


class MoeConfig(Branch):
    routing_replay: Literal["off", "r2", "r3"] = "r3"
    """`r3`: replay the engine's routes from the rollout. `r2`: replay the trainer's routes from
    before the update. `off`: no replay."""
    replay: Literal["ids", "ids_order", "ids_weights", "ids_order_weights"] = "ids"
    """What is replayed of a route. `ids`: the choice of experts; the trainer weights their outputs
    by its current router scores. `order`: the outputs are summed in the order of the route, as in
    the engine, instead of by expert number. `weights`: the recorded gate weights are used, with the
    gradient passed through to the router; with r3 this requires `rollout.return_routing_weights`."""
    load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """Load-balancing loss of the router. It is off by default, because it pulls the router away
    from what the reward asks for. The load is balanced over each micro-batch (`aux_loss`, which
    therefore depends on how samples are packed), over each sequence (`seq_aux_loss`, which does not
    depend on packing), or over all ranks and the micro-batches of the step so far
    (`global_aux_loss`). The load counts the experts that the router would choose now, even under
    replay."""
    aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss; requires a `load_balancing_type`. The loss is a sum over
    layers of a mean over the tokens of the step, without padding and samples without a loss."""
    z_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss (arXiv 2202.08906 eq. 5), a mean over the same tokens as the
    load-balancing loss."""
    expert_bias_update_rate: float = Field(default=0.0, ge=0)
    """Step size of the auxiliary-loss-free balancing bias (arXiv 2408.15664), for models whose
    router has such a bias; 0 keeps the bias as it was loaded."""

    @field_validator("routing_replay", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 reads a bare `off` as false


class SftConfig(RowsConfig):
    """Supervised steps before the first rollout, on rows with a `completion`, or with `messages`
    that end with an assistant's message."""

    num_steps: int = Field(ge=1)
    """Optimizer steps of the supervised training."""
    batch_size: int = Field(ge=1)
    """Rows in each supervised step."""
    lr: float = Field(gt=0)
    """Learning rate of the supervised steps. RL then starts with a new optimizer."""


class CheckpointConfig(Branch):
    save_every: int = Field(default=50, ge=0)
    """Steps between checkpoints. The last step is always saved; with 0 only the last step is saved."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    stop_limit_s: float = Field(default=25.0, gt=0)
    """Seconds after SIGTERM or SIGHUP within which the step must be finished and saved. Otherwise
    the process ends, and the steps since the last checkpoint are lost. SLURM and Kubernetes kill
    after 30 s. After SIGUSR1 the step has no time limit."""
    async_save: bool = True
    """Write in the background while training continues; the step only waits for the copy to host
    memory."""
    snapshot_every: int = Field(default=0, ge=0)
    """Steps between snapshots; 0 takes no snapshots. A snapshot is a checkpoint in the memory of
    the nodes, from which a restart after a lost rank continues. Only the newest snapshot is kept,
    and it is removed when the run is done."""
    snapshot_folder: str | None = None
    """Folder on each node for its snapshots; null takes /dev/shm. On several nodes it must have
    room for four times the data that the ranks of a node save: two snapshots, and copies of a
    neighbour's two snapshots. On a single node it needs room for twice this data."""
