"""Configuration of the trainer: model, parallel layout, optimizer, MoE, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mrl.config.branch import Branch, off_as_word
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
    """Number of tensor-parallel ranks. Above 1, sequence parallelism is on, because Megatron requires
    it for MoE."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Number of pipeline stages, that is, of ranks among which the layers are divided."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Number of model chunks per pipeline rank, which makes the pipeline schedule interleaved. Null
    takes the schedule without interleaving."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks among which the tokens of a micro-batch are divided.
    `train.micro_batch_tokens` counts the tokens of all these ranks together."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks among which the experts of each MoE layer are divided."""
    expert_tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks that split each expert. With 1, every rank has complete experts."""
    decoder_first_pipeline_num_layers: int | None = Field(default=None, ge=1)
    """Number of layers in the first pipeline stage. Null: the same number as in the other stages."""
    decoder_last_pipeline_num_layers: int | None = Field(default=None, ge=1)
    """Number of layers in the last pipeline stage. Null: the same number as in the other stages."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens are sent to their experts. `allgather` pads all micro-batches to one length;
    `flex` is DeepEP, on GPUs where deep_ep is installed."""


class TrainConfig(Branch):
    num_steps: int = Field(default=0, ge=0)
    """Number of rollout steps of the whole run. Give this or `num_epochs`; with `num_epochs`,
    config.yaml contains the resulting number of steps."""
    num_epochs: float | None = Field(default=None, gt=0, le=1_000_000)
    """Number of passes over the data set, instead of `num_steps`. The run has as many rollout steps
    as these passes need: `num_epochs x prompts / rollout.prompts_per_step`, rounded up."""
    cpu_threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Number of threads of each trainer rank and engine on CPUs, at most 1024. `auto`:
    OMP_NUM_THREADS if it is set; otherwise one thread if the model's hidden size is below 512, and
    for larger models the cores of the machine divided by its ranks. The number of threads changes the
    order in which numbers are summed, and therefore the last bits of the results."""
    num_steps_per_rollout: int = Field(default=1, ge=1)
    """Number of optimizer steps (mini-batches) in one pass over the samples of a rollout."""
    num_epochs_per_rollout: int = Field(default=1, ge=1)
    """Number of passes over the samples of a rollout (verl's `ppo_epochs`, TRL's `num_iterations`),
    each with `num_steps_per_rollout` optimizer steps. All passes use the old log-probs, advantages
    and routes from before the first pass."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Maximum number of packed tokens in a micro-batch. A sample that is longer than this gets a
    micro-batch of its own."""
    share_prefixes: Literal["off", "auto"] = "off"
    """Whether the trainer computes the common prefix of a prompt's samples once for all of them instead
    of once for each. `off`: never. `auto`: in the steps in which this reduces the number of computed
    token positions by a factor of at least 1.2. A position is shared only if the tokens and the
    captured routes up to it are equal. With sharing, the samples of a prompt go into the same
    micro-batch, and `micro_batch_tokens` limits the computed positions. The results are equal up to
    rounding. TransformerEngine's layers do not support sharing."""
    recompute: bool = False
    """Recompute all activations in the backward pass, which saves memory and costs one more forward
    pass."""
    logprob_chunk_tokens: int = Field(default=1024, ge=0)
    """Number of loss tokens whose logits are in memory at a time. Log-probs and entropy are computed
    from the hidden states in chunks of this size, and the backward pass computes the logits of each
    chunk again. The memory in bytes is chunk tokens x vocabulary / tensor-parallel size x bytes of
    the dtype. A smaller chunk needs less memory; with a larger chunk, the gradient of the output
    layer's weight is read and written less often. 0 computes the logits of all tokens of a
    micro-batch at once, including prompt tokens, and does not compute them again in the backward
    pass. The results are equal up to rounding."""

    mtp_loss_scaling_factor: float = Field(default=0.0, ge=0)
    """Weight of the loss of the checkpoint's multi-token-prediction (MTP) layers, which are then
    trained too (docs/models.md). Each such layer predicts the loss tokens from one token further
    behind; the loss is the mean of their cross-entropies over targets and layers. Only the MTP layers
    learn from it: the gradients of all other weights, and the norm by which gradients are clipped, are
    the same as without it. 0 does not load these layers, and `mrl export` copies them. Megatron's
    default is 0.1, and slime's recipes use 0.2."""

    @field_validator("share_prefixes", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return off_as_word(value)


class OptimizerConfig(Branch):
    name: Literal["adam", "muon"] = "adam"
    """`adam` updates all parameters with AdamW. `muon` updates the weight matrices of attention, MLPs
    and experts with Muon, and everything else with AdamW; see docs/muon.md."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up, of Adam and of Muon; it then decays according to
    `lr_decay_style`."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps over which the learning rate rises linearly from 0 to `lr`."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = (
        "constant"
    )
    """How the learning rate falls from `lr` to `min_lr` after the warm-up. The names and formulas
    are those of Megatron. `WSD` (arXiv 2404.06395) keeps the learning rate constant until the last
    `wsd_decay_steps` optimizer steps. A critic's learning rate decays in the same way."""
    lr_decay_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps, including the warm-up, after which the learning rate is `min_lr`.
    This key is allowed only with an `lr_decay_style` other than `constant`. Null takes all
    optimizer steps of the policy: `(train.num_steps - critic.warmup_steps) x num_epochs_per_rollout
    x num_steps_per_rollout`. The critic's decay ends at the same step."""
    min_lr: float = Field(default=0.0, ge=0)
    """The learning rate at the end of the decay. A critic's learning rate decays to `critic.lr x
    min_lr / lr`."""
    wsd_decay_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps at the end in which `WSD` lowers the learning rate; required with
    `WSD`."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """How the learning rate falls during the last `wsd_decay_steps` steps of `WSD`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Coefficient of the decoupled weight decay of AdamW and of Muon; 0 turns weight decay off."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's second moment."""
    adam_eps: float = Field(default=1e-8, ge=1e-37)
    """Adam's epsilon, which is added to the square root of the second moment in the denominator. A
    smaller one would be 0 in float32, and weights without a gradient would become NaN."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0 turns clipping off."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of Muon's momentum."""
    muon_use_nesterov: bool = True
    """Whether Muon's momentum is Nesterov's."""
    muon_num_ns_steps: int = Field(default=5, ge=1, le=99)
    """Number of Newton-Schulz iterations that orthogonalise an update."""
    muon_coefficient_type: Literal["simple", "quintic"] = "simple"
    """Coefficients of the iterations. `simple`: the three of Keller Jordan's Muon, which torch and
    Moonlight use. `quintic`: five sets of three, Megatron's default; `muon_num_ns_steps` must be a
    multiple of 5."""
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = "spectral"
    """Scale of an orthogonalised update of m outputs and n inputs. `spectral`: sqrt(max(m, n)).
    `shape_scaling`: sqrt(max(1, m / n)). `unit_rms_norm`: sqrt(m / n)."""
    muon_extra_scale_factor: float = Field(default=0.2, gt=0)
    """Factor of the scale. 0.2 with `spectral` gives updates of about AdamW's size (Moonlight, arXiv
    2502.16982), so that `lr` and `weight_decay` of AdamW can be kept. Megatron's default is 1."""
    muon_split_qkv: bool = True
    """Whether the queries, keys and values of a layer are three matrices for Muon, or one."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer state (fp32 weights, moments) over the data-parallel ranks. With Muon each
    rank keeps the state of some whole parameters."""

    @property
    def divides_ranges(self) -> bool:
        """Whether Megatron's distributed optimizer shards flattened buffers, as it does for Adam."""
        return self.use_distributed_optimizer and self.name == "adam"

    def with_defaults(self, lr: float) -> OptimizerConfig:
        """Return the same kind of optimizer with the learning rate `lr`, and with defaults for the
        schedule, Adam, weight decay and clipping."""
        kept = {
            key: value
            for key, value in self.model_dump().items()
            if key.startswith("muon_") or key in ("name", "use_distributed_optimizer")
        }
        return OptimizerConfig(lr=lr, **kept)


class MoeConfig(Branch):
    routing_replay: Literal["off", "r2", "r3"] = "r3"
    """Which routes the trainer replays; a route is the choice of experts for a token in each layer.
    `r3`: the engine's routes from the rollout. `r2`: the trainer's own routes from before the
    update. `off`: none, so that the router chooses in every forward pass."""
    replay: Literal["ids", "ids_order", "ids_weights", "ids_order_weights"] = "ids"
    """Which parts of a route are replayed. All values replay the choice of experts. `ids`: the
    trainer weights the experts' outputs by its current router scores, and sums them in the order of
    expert numbers. Values with `order`: the outputs are summed in the order of the route, as in the
    engine. Values with `weights`: the outputs are weighted by the recorded gate weights, and the
    gradient is passed through to the router; with r3 this requires
    `rollout.return_routing_weights`."""
    load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """Load-balancing loss of the router. It is off by default, because it changes the router
    independently of the reward. `aux_loss` balances the load over each micro-batch, and therefore
    depends on how samples are packed. `seq_aux_loss` balances it over each sequence, and does not
    depend on packing. `global_aux_loss` balances it over all ranks and the micro-batches of the
    step so far. The load is computed from the experts that the router would choose with its current
    weights, even if other routes are replayed."""
    aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss; requires a `load_balancing_type`. The loss is averaged
    over the tokens of the step, without padding and without samples that have no loss, and is
    summed over the layers."""
    z_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss (arXiv 2202.08906 eq. 5), a mean over the same tokens as the
    load-balancing loss."""
    expert_bias_update_rate: float = Field(default=0.0, ge=0)
    """Step size of the auxiliary-loss-free balancing bias (arXiv 2408.15664), for models whose
    router has such a bias; 0 keeps the bias as it was loaded."""

    @field_validator("routing_replay", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return off_as_word(value)


class SftConfig(RowsConfig):
    """Supervised fine-tuning before the first rollout, on rows with a `completion`, or with
    `messages` whose last message is the assistant's."""

    num_steps: int = Field(ge=1)
    """Number of optimizer steps of the supervised fine-tuning."""
    batch_size: int = Field(ge=1)
    """Number of rows in each supervised step."""
    lr: float = Field(gt=0)
    """Learning rate of the supervised steps. RL then starts with a new optimizer."""


class CheckpointConfig(Branch):
    save_every: int = Field(default=50, ge=0)
    """Number of steps between checkpoints. The last step is always saved; with 0 only the last step
    is saved."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    stop_limit_s: float = Field(default=25.0, gt=0)
    """Seconds after SIGTERM or SIGHUP within which the step in progress must be finished and saved.
    Otherwise the process ends, and the steps since the last checkpoint are lost. By default, SLURM
    and Kubernetes kill a process 30 s after SIGTERM. After SIGUSR1 the step has no time limit."""
    async_save: bool = True
    """Write checkpoints in the background while training continues; a step only waits for the copy
    of its state to host memory."""
    snapshot_every: int = Field(default=0, ge=0)
    """Number of steps between snapshots; 0 takes no snapshots. A snapshot is a checkpoint in the
    memory of the nodes, from which the run continues after a rank was lost. Only the newest
    snapshot is kept, and it is removed when the run is done."""
    snapshot_folder: str | None = None
    """Folder on each node for its snapshots; null takes /dev/shm. On a single node it must have room
    for two snapshots, that is, twice the data that the ranks of the node save. On several nodes it
    must have room for four times this data, because it also holds copies of another node's two
    snapshots."""
