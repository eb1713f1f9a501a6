"""The recipe: one YAML file plus dotted `key=value` overrides, read into a frozen tree.

Unknown keys fail with a suggestion. Rooms receive their own branch, never the whole tree.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mrl.errors import InputError


class Branch(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelConfig(Branch):
    path: str
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on GPUs, float32 on CPUs. Both engines use it."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """`auto`: TransformerEngine where it is installed and there is a GPU; the plan says which."""


class ParallelConfig(Branch):
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Above 1, sequence parallelism is on: Megatron requires it for MoE."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Model chunks per pipeline rank (interleaved schedule)."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of a micro-batch: `train.micro_batch_tokens` is for all of them."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    expert_tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share one expert; 1 gives every tensor-parallel rank whole experts."""
    decoder_first_pipeline_num_layers: int | None = Field(default=None, ge=1)
    """Layers of the first pipeline stage, where it should have fewer (or more) than the others."""
    decoder_last_pipeline_num_layers: int | None = Field(default=None, ge=1)
    """Layers of the last pipeline stage."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens travel to their experts. `allgather` pads all micro-batches to one length."""


class TrainConfig(Branch):
    num_steps: int = Field(ge=1)
    """Rollout steps of the whole run."""
    num_steps_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps per rollout (mini-batches)."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Packed tokens per micro-batch; a longer single sample gets a micro-batch of its own."""
    recompute: bool = False
    """Full activation recompute: less memory, one more forward."""


class OptimizerConfig(Branch):
    lr: float = Field(default=1e-6, gt=0)
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """Global gradient norm; 0 turns clipping off."""
    use_distributed_optimizer: bool = False
    """Share the optimizer state (fp32 weights, moments) out over data-parallel ranks."""


class RolloutConfig(Branch):
    engine: str = "sglang"
    """A file of mrl/rollout/, or `package.module` from outside."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that one engine spans."""
    prompts_per_step: int = Field(default=16, ge=1)
    samples_per_prompt: int = Field(default=8, ge=1)
    max_response_len: int = Field(ge=1)
    min_response_len: int = Field(default=0, ge=0)
    """0, or max_response_len for completions of one exact length (the end token is ignored)."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1 samples come from the truncated distribution, while the log-probs of both sides stay
    those of the whole one."""
    context_len: int | None = Field(default=None, ge=1)
    """Prompt plus response; by default the model's max_position_embeddings."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """KV cache size in tokens; by default 16,384 on CPUs and the engine's choice on GPUs."""
    mem_fraction_static: float = Field(default=0.6, gt=0, lt=1)
    """Share of GPU memory for the engine's weights and KV cache while it is awake."""
    weight_bucket_mb: int = Field(default=256, ge=1)
    """Bytes of weights in flight during a sync, in MiB."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Fields of SGLang's ServerArgs to set, by their Python names (`attention_backend: triton`), on top
    of what mrl sets. Those that mrl answers for itself are refused, with the key that sets them."""
    weight_sync: Literal["tensor", "distributed", "disk"] = "tensor"
    """How weights reach the engine. `tensor`: handles to the trainer's memory (shared memory on CPUs,
    CUDA IPC on GPUs). `distributed`: a process group with the engine's ranks (gloo; refused on GPUs,
    where the engine has the trainer's). `disk`: safetensors in a private folder."""
    over_sampling: float = Field(default=1.0, ge=1)
    """Prompts started for each one that the step needs: it goes on with those that finish first, and
    no longer waits for the slowest. 1 waits for all."""
    unfinished: Literal["drop", "resume", "defer"] = "drop"
    """What becomes of prompts that were started and not needed. `drop`: given up, which favours prompts
    with short answers. `resume` (APRIL, arXiv 2509.18521): continued first in the next step under its
    newer weights; needs `algorithm.importance`. `defer` (RollPacker, arXiv 2509.21009): started anew in
    a step that waits for all, once so many have gathered."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    request_timeout_s: float = Field(default=1800.0, gt=0)
    """For all completions of a step, or of one turn of its conversations."""
    stall_timeout_s: float = Field(default=120.0, gt=0)
    """An engine whose scheduler gives no sign for so long is taken for hung, and replaced."""
    max_restarts: int = Field(default=3, ge=0)
    """Engines that may be lost and replaced in one step before the run gives up."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Samples that an engine works on at a time, the rest waits; by default the engine's choice."""
    canary_prompts: int = Field(default=4, ge=0)
    """Prompts whose log-probs trainer and engine must agree on after every sync; 0 turns it off."""
    canary_tolerance: float | None = Field(default=None, gt=0)
    """Mean absolute difference of their log-probs; by default 1e-3 in float32, and 0.1 in half
    precision, where a few tokens take other experts."""

    @property
    def num_started(self) -> int:
        """Prompts that a step with over-sampling starts."""
        # Less a trifle: 10 x 1.1 is a little more than 11.
        return math.ceil(self.prompts_per_step * self.over_sampling - 1e-9)


class AlgorithmConfig(Branch):
    name: str = "gspo"
    """A file of mrl/algorithms/, or `package.module` from outside."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Ratio is clipped below at 1 - clip_low; by default the algorithm's published value."""
    clip_high: float | None = Field(default=None, gt=0)
    """Ratio is clipped above at 1 + clip_high; by default the algorithm's published value."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference) in the loss; 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of one sample (Schulman 2020); k3 is never negative and has little variance."""
    reference_path: str | None = None
    """Folder of the frozen reference, of the model's architecture and sizes; by default model.path, as
    it was before any warm start or resume."""
    importance: Literal["none", "tis", "mis"] = "none"
    """Weight exp(old - rollout) that corrects for what the tokens were sampled from: another engine,
    and older weights where `rollout.unfinished` is `resume`. `tis`: clamped into a range; `mis`: 0
    outside of it."""
    importance_level: Literal["token", "sequence"] = "token"
    """One weight a token, or one a sequence: of the mean of old - rollout over its loss tokens."""
    importance_low: float | None = Field(default=None, ge=0)
    """Lower end of that range; by default 0 for `tis`, for `mis` 0.5 a token and 0.999 a sequence."""
    importance_high: float | None = Field(default=None, gt=0)
    """Upper end; by default 2 for `tis`, for `mis` 5 a token and 1.002 a sequence."""
    advantage_eps: float = Field(default=1e-4, gt=0)
    """Added to the group's standard deviation: a nearly equal group must not explode."""


class MoeConfig(Branch):
    routing_replay: Literal["off", "r2", "r3"] = "r3"
    """r3: replay the rollout's routes; r2: replay the trainer's own pre-update routes; off."""
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


class DataConfig(Branch):
    path: str
    """JSONL: `prompt` (a string or chat messages), `answer`, `info`, any other column."""
    shuffle: bool = True


class EnvironmentConfig(Branch):
    name: str
    """A file of mrl/environments/, or `file.py:Class`, or `package.module:Class`."""
    arguments: dict[str, Any] = {}
    """Keywords of the class, which is made anew for each episode."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of the policy in one episode; `rollout.max_response_len` is for each of them, and
    `rollout.context_len` for all that an episode holds."""
    time_limit_s: float = Field(default=30.0, gt=0)
    """For one answer of the environment; over it, it is killed and the episode masked."""
    num_workers: int = Field(default=1, ge=1)
    """Processes that share an engine's episodes: as many environments answer at one time."""


class WarmStartConfig(Branch):
    path: str
    """JSONL with `prompt` and `completion`: supervised steps before the first rollout."""
    num_steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    lr: float = Field(gt=0)


class CheckpointConfig(Branch):
    save_every: int = Field(default=50, ge=0)
    """Steps between checkpoints, beside the last step; 0 saves only that."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    async_save: bool = True
    """Write in the background while training goes on; the step only waits for the copy to the host."""


class DebugConfig(Branch):
    save_rollouts: bool = False
    """Write rollouts/step_*.safetensors with all tensors, for load_rollouts."""
    load_rollouts: str | None = None
    """A `rollouts` folder of another run: train from it, with no engine."""
    rollout_only: bool = False
    """Generate and score, never train."""


class Recipe(Branch):
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    moe: MoeConfig = MoeConfig()
    reward: str | None = None
    """A file of mrl/rewards/, or `file.py:func`, or `package.module:func`."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """For one call of the reward function; over it, the call is killed and the samples masked."""
    environment: EnvironmentConfig | None = None
    """What the policy talks with, in several turns; it takes the place of `reward`."""
    data: DataConfig
    warm_start: WarmStartConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    debug: DebugConfig = DebugConfig()
    output_dir: str
    seed: int = 0


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe and apply `dotted.key=value` overrides (values are YAML).

    Raises InputError that names the key, what was given, what was expected and the nearest key.
    """
    tree = _read_yaml(Path(path))
    for item in overrides or []:
        _apply_override(tree, item)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(error)}") from None


def dump_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe, every default spelled out, so that it can be loaded again."""
    partial = path.with_suffix(".partial")  # other ranks may be reading the file
    partial.write_text(yaml.safe_dump(recipe.model_dump(), sort_keys=False))
    partial.replace(path)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InputError(f"recipe {path}: {error.strerror}; give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).split())
        raise InputError(f"recipe {path} is not valid YAML: {first}") from None
    if not isinstance(tree, dict):
        raise InputError(f"recipe {path}: expected a mapping of keys, got {type(tree).__name__}")
    return tree


def _apply_override(tree: dict[str, Any], item: str) -> None:
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise InputError(f"override {item!r}: expected key=value, e.g. optimizer.lr=1e-6")
    *parents, leaf = key.split(".")
    for depth, name in enumerate(parents):
        child = tree.setdefault(name, {})
        if child is None:
            child = tree[name] = {}
        if not isinstance(child, dict):
            raise InputError(
                f"override {item!r}: {'.'.join(parents[: depth + 1])} is a value, not a branch"
            )
        tree = child
    try:
        tree[leaf] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"override {item!r}: {value!r} is not a YAML value") from None


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r}{_suggest(key)}")
        elif problem["type"] == "missing":
            lines.append(f"{key}: required, and not given")
        else:
            lines.append(f"{key}: {problem['msg']}, got {problem['input']!r}")
    return "; ".join(lines)


def _suggest(key: str) -> str:
    """The same name in another branch, else the nearest name in the same branch, else anywhere."""
    known = _all_keys(Recipe)
    branch, _, leaf = key.rpartition(".")
    leaves = {k: k.rpartition(".")[2] for k in known}
    near = [k for k in known if leaves[k] == leaf]
    for places in ([k for k in known if k.rpartition(".")[0] == branch], known):
        if not near:
            names = difflib.get_close_matches(leaf, [leaves[k] for k in places], n=1)
            near = [k for k in places if leaves[k] in names]
    return f"; did you mean {near[0]!r}?" if near else ""


def _all_keys(branch: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in branch.model_fields.items():
        keys.append(prefix + name)
        inner = field.annotation
        options = [inner, *getattr(inner, "__args__", ())]
        for option in options:
            if isinstance(option, type) and issubclass(option, BaseModel):
                keys += _all_keys(option, f"{prefix}{name}.")
    return keys
