"""Configuration of the rollout: engine, prompts, environments."""

from __future__ import annotations

import math
import shlex
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from mrl.config.branch import Branch, as_words, one_or_several
from mrl.config.dtypes import Dtype
from mrl.config.mcp import McpConfig
from mrl.config.training import ModelConfig

FULL_SYNC_EVERY = 20
"""The default of `rollout.full_sync_every`."""


class SharedRolloutConfig(Branch):
    """Configuration of a rollout engine. All runs that share the engine have the same values
    (docs/tenants.md)."""

    engine: str = "sglang"
    """The engine: one of mrl/engines/, or your own as `path/file.py` or `package.module`. Append
    `:NAME` if your engine is called neither `Engine` nor `build_engine`."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: every rank trains, and engines take turns with the trainer on the same devices.
    `disaggregated`: the last `num_ranks` ranks only run engines and do not train; see
    docs/async.md."""
    num_ranks: int | None = Field(default=None, ge=1)
    """Number of ranks that run engines and do not train; a multiple of tensor_parallel_size. Only
    with `placement: disaggregated`."""
    dtype: Dtype = "auto"
    """The dtype of the engine's weights and computation; `auto` takes the trainer's dtype
    (`model.dtype`). If the two dtypes differ, weights are cast before they are sent to the engine."""
    quantization: Literal["none", "fp8_block", "fp8_block_ue8m0", "int8"] = "none"
    """Format of the weight matrices of attention, MLPs and experts in the engine. The products with
    these matrices are computed in the same format. `fp8_block`: e4m3 with one float32 scale for each
    block of 128 x 128 weights (the format of DeepSeek-V3's checkpoints), and one scale for each token
    and group of 128 inputs of a layer. `fp8_block_ue8m0`: the same, but the weights' scales are powers
    of two. `int8`: one scale for each output channel of a matrix, and one for each token of a layer's
    input. Weights are quantised before every sync; the trainer keeps its own precision. See
    docs/quantization.md."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks that one engine spans. If that is more than the ranks of a node, the engine
    must span complete nodes. It may exceed the number of key/value heads, which SGLang then
    replicates."""
    expert_parallel_size: int = Field(default=1, ge=1)
    """Number of groups of engine ranks among which the experts are divided (SGLang's `ep_size`).
    Each group has tensor_parallel_size / expert_parallel_size ranks, which split every expert of
    the group by columns."""
    data_parallel_attention_size: int = Field(default=1, ge=1)
    """Number of attention replicas among the engine's ranks, each with its own requests and KV
    cache (DP attention: SGLang's `dp_size` with `enable_dp_attention`). DP attention suits models
    with few key/value heads or with latent attention, because tensor parallelism would replicate
    their KV cache."""
    context_len: int | None = Field(default=None, ge=1)
    """Maximum tokens of prompt plus response; by default the model's max_position_embeddings."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Size of the KV cache in tokens; by default 16,384 on CPUs and the engine's choice on GPUs."""
    mem_fraction_static: float = Field(default=0.6, gt=0, lt=1)
    """Share of GPU memory for the engine's weights and KV cache while the engine is awake."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Maximum number of samples that an engine processes at a time; further samples wait. By default
    the engine's choice."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Fields of SGLang's ServerArgs by their Python names (`attention_backend: triton`), in
    addition to the fields that mrl sets. A field that mrl sets itself is refused; the message names
    the recipe's key."""
    batch_invariant: bool = False
    """The engine computes the same bits for a request regardless of the other requests in its
    batch, of cached prefixes, and of the size of the KV cache. On CPUs this works in float32 for
    Qwen3-MoE. On GPUs this key sets SGLang's `enable_deterministic_inference`, which is untested.
    `true_on_policy` implies this key."""
    return_routing_weights: bool = False
    """The engine also returns the gate weights, in float32, of the experts that its router chose.
    They are needed for `moe.replay: ids_weights`, and used by `diagnosis.decompose_every`. This
    works only on CPUs and if routes are captured; it adds 4 bytes for each expert id."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit for the start of an engine, including its first request, in seconds. If engines
    run freely (see `async.groups_in_flight`), training begins as soon as one engine has started,
    and each other engine must start within this time."""
    request_timeout_s: float = Field(default=1800.0, gt=0)
    """Time limit in seconds from when a request is sent to the engine until its completion arrives.
    Time in the engine's queue counts too, so if the requests of a whole step are sent at once, all
    of its completions must arrive within this time."""
    stall_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds without a sign of life from an engine's scheduler after which the engine is
    considered hung and is replaced."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum number of engines that may be lost and replaced in one step; at the next loss the run
    ends. On rollout ranks, it is the maximum number of engines that one worker process may lose
    between two finished batches (between two finished groups if engines run freely, see
    `async.groups_in_flight`). It is also the maximum number of times in a row that the worker
    process of a rollout rank may end before it has joined the run."""

    def engine_dtype(self, model: ModelConfig) -> Literal["auto", "float32", "bfloat16"]:
        """Return the dtype requested for the engine, or `auto` if the device decides."""
        return model.dtype if self.dtype == "auto" else self.dtype


class RolloutConfig(SharedRolloutConfig):
    prompts_per_step: int = Field(default=16, ge=1)
    """Number of prompts that each step trains on."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Number of completions per prompt, which form a sample group."""
    max_response_len: int = Field(ge=1)
    """Maximum tokens of a completion, or of one turn of a conversation."""
    min_response_len: int = Field(default=0, ge=0)
    """Either 0, or equal to max_response_len, which makes all completions exactly that long
    (end-of-sequence tokens are ignored)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature. The trainer's log-probs are computed with the same temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. Below 1, samples come from the truncated distribution, but the log-probs of
    trainer and engine remain those of the full distribution unless `sampling_mask` is on."""
    top_k: int = -1
    """Number of most likely tokens from which each token is sampled; -1 means all tokens. Log-probs
    are as with `top_p`."""
    sampling_mask: bool = False
    """Normalise log-probs over the tokens that `top_p` and `top_k` kept. The engine returns the
    kept tokens for each sampled token, and trainer and engine compute log-probs of the truncated
    distribution (DeepSeek-V3.2's "keep sampling mask", arXiv 2512.02556). This requires `top_k`
    from 2 to 4096 and SGLang 0.5.20 or later, and costs 4 bytes for each kept token."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, or a turn of a conversation; at most 32. The matched string is
    part of the completion: the reward sees it, and its tokens are trained on."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, in addition to the model's own end-of-sequence tokens."""
    weight_bucket_mb: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Size in MiB of the buckets in which weights are sent to the engine. During a sync every rank
    holds two buckets in memory. Each bucket needs one request, regardless of its size. `auto` is a
    64th of the model, but at least 256 MiB and at most 2 GiB. For models below 1 GiB it is a
    quarter of the model, but at least 1 MiB."""
    true_on_policy: bool = False
    """Trainer and engine compute the same bits: old log-probs equal the engine's, and routes agree.
    This works only on CPUs in float32, and is slower; docs/on_policy.md says what it requires and
    when it is refused."""
    weight_sync: str = "tensor"
    """How weights reach the engine: the name of a file in mrl/weight_sync/transports. `tensor`:
    handles to the trainer's memory (shared memory on CPUs, CUDA IPC on GPUs). `disk`: safetensors
    in a private folder inside the run folder. All nodes of an engine must share the run folder."""
    weight_encoding: Literal["full", "delta"] = "full"
    """What a weight sync sends to the workers of a disaggregated run. `full`: all weights. `delta`:
    only the elements whose bits changed since the previous version, if the worker holds that version.
    The worker compares its result with digests from the trainer; a bucket that differs is sent again
    in full. Each trainer rank that sends weights keeps a copy of them in host memory.
    docs/rollout-weights.md says when deltas are faster."""
    full_sync_every: int | None = Field(default=None, ge=2)
    """With `weight_encoding: delta`, each worker gets one in this many versions in full. By default
    20."""
    over_sampling: float = Field(default=1.0, ge=1, le=1_000_000)
    """Number of prompts started, as a multiple of `prompts_per_step`. The step trains on the
    prompts that finish first and does not wait for the slowest; 1 waits for all."""
    partial_rollouts: Literal["drop", "resume", "defer"] = "drop"
    """What happens to prompts that a step has started but no longer needs. `drop`: their partial
    rollouts are discarded, which favours prompts with short responses. `resume` (APRIL, arXiv
    2509.18521): the next step continues these rollouts first, with its newer weights; requires
    `algorithm.importance`. `defer` (RollPacker, arXiv 2509.21009): once enough such prompts have
    accumulated, they start again from the beginning, in a step that waits for all its samples."""
    dynamic_sampling_rounds: int = Field(default=4, ge=1)
    """With `algorithm.dynamic_sampling`, a step generates in rounds until it has prompts_per_step
    groups with unequal rewards; this key is the maximum number of rounds. Each round takes as many
    new prompts as groups are missing. After the last round, groups with equal rewards fill the
    step, but none of their tokens is in the loss."""
    canary_prompts: int = Field(default=4, ge=0)
    """Number of prompts used to check, after every sync, that trainer and engine agree on the
    log-probs; 0 turns the check off."""
    canary_tolerance: float | None = Field(default=None, gt=0)
    """Largest mean absolute difference between the log-probs of trainer and engine on the canary
    prompts. By default 1e-3 if trainer and engine both compute in float32, otherwise 0.1, because
    half precision routes a few tokens to other experts. With `quantization`, the limit is higher, to
    allow for rounding errors. mrl measures the mean absolute change of the trainer's log-probs when
    noise as large as the weights' rounding errors is added to the weights, and raises the limit by
    4 times this change."""

    endpoint: bool = False
    """Serve the policy to agents at an OpenAI-compatible address of this machine while samples are
    generated, and train on the tokens that were sampled there. Requires `environment.command`; see
    docs/endpoint.md."""
    endpoint_branches: Literal["longest", "tree"] = "longest"
    """Which branches of an agent's conversations are trained, if the agent rewrote earlier messages or
    held several conversations. `longest`: of each episode the branch with the most sampled tokens.
    `tree`: all branches; a sampled token that several of them share is in the loss once."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return one_or_several(value)

    def weight_bucket_bytes(self, model_bytes: int) -> int:
        """Return the size of a bucket in bytes, for a model whose weights are sent as `model_bytes`
        bytes."""
        if self.weight_bucket_mb != "auto":
            return self.weight_bucket_mb << 20
        at_least = min(256 << 20, max(1 << 20, model_bytes // 4))
        return min(2 << 30, max(at_least, model_bytes // 64))

    @property
    def max_deltas(self) -> int:
        """Maximum number of consecutive versions that are sent as deltas; 0 with `weight_encoding:
        full`."""
        every = FULL_SYNC_EVERY if self.full_sync_every is None else self.full_sync_every
        return every - 1 if self.weight_encoding == "delta" else 0

    @property
    def num_started(self) -> int:
        """Number of prompts that a step starts: `prompts_per_step x over_sampling`, rounded up."""
        # In floating point 10 x 1.1 is slightly more than 11.
        return math.ceil(self.prompts_per_step * self.over_sampling - 1e-9)


class EnvironmentConfig(Branch):
    name: str | None = None
    """The environment: a file of mrl/environments/, `file.py:Class`, or `package.module:Class`. Give
    this, `command`, `verifiers` or `mcp`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment class. Each episode creates a new instance with them. With
    `verifiers`, the keys of its environment's config, and `select`."""
    command: tuple[str, ...] = ()
    """The agent, as a program and its arguments: each episode runs it once. It talks to the policy at
    `OPENAI_BASE_URL` with the key `OPENAI_API_KEY`, reads the row from its standard input, and prints
    the reward. `python` is the Python that runs mrl. Requires `rollout.endpoint: true`; see
    docs/endpoint.md."""
    verifiers: str | None = None
    """An environment for verifiers 0.4: the id of an installed package, or a folder that has one.
    Requires `rollout.endpoint: true`; see docs/environments_elsewhere.md."""
    mcp: McpConfig | None = None
    """MCP servers, whose tools the policy may call; `reward` judges its last answer. Requires
    `rollout.endpoint: true`; see docs/environments_elsewhere.md."""
    python: str | None = None
    """The Python that runs the workers of `verifiers` or `mcp`, such as the one of an environment that
    has verifiers. Null takes the Python that runs mrl."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum number of turns that the policy takes in an episode. `rollout.max_response_len` limits
    the tokens of each turn, and `rollout.context_len` those of the whole episode."""
    time_limit_s: float = Field(default=30.0, gt=0)
    """Time limit for one answer of the environment, in seconds. An environment that takes longer is
    killed, and its episode is masked. A `command` has `episode_limit_s` instead. For `mcp`, the limit
    of one call of a tool. A worker of `verifiers` or `mcp` that does not respond for this time is
    killed with all its episodes."""
    episode_limit_s: float = Field(default=600.0, gt=0)
    """Time limit for a whole episode of `command`, `verifiers` or `mcp`, in seconds. An agent that
    takes longer is killed with all processes that it started, and its episode is masked. The time in
    which a lost engine is replaced does not count."""
    num_workers: int = Field(default=1, ge=1)
    """Number of processes that run the environments of one engine's episodes. A step that is
    not `async` occupies its process. A `command` has `num_agents` instead."""
    num_agents: int = Field(default=32, ge=1)
    """Maximum number of agents (`command`), or of episodes of `verifiers` or `mcp`, that run at a time
    for one engine."""

    @field_validator("command", mode="before")
    @classmethod
    def _as_words(cls, value: Any) -> Any:
        return as_words(value)

    @model_validator(mode="after")
    def _one_form(self) -> EnvironmentConfig:
        forms = ("name", "command", "verifiers", "mcp")
        given = [form for form in forms if getattr(self, form)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are" if given else "none is"
            raise ValueError(
                f"name, command, verifiers and mcp: {found} given, expected exactly one: a class of "
                "Python as `name`, an agent of your own as `command`, an environment of verifiers, or "
                "the servers of tools as `mcp`"
            )
        if self.command and self.arguments:
            raise ValueError(
                "arguments are keywords of the class that `name` gives; write those of a command after "
                "its program (command: [python, agent.py, --turns, 3])"
            )
        if self.mcp and self.arguments:
            raise ValueError("arguments: an MCP server has none here; write them in mcp.command")
        if self.python is not None and not self.is_hosted:
            raise ValueError(f"python is for the workers of verifiers and mcp, not of {given[0]}")
        return self

    @property
    def is_hosted(self) -> bool:
        """Whether episodes are played in the worker processes of mrl.environments.hosted."""
        return self.verifiers is not None or self.mcp is not None

    @property
    def is_agent(self) -> bool:
        """Whether episodes talk to the policy at the endpoint."""
        return bool(self.command) or self.is_hosted

    @property
    def gives_rewards(self) -> bool:
        """Whether the environment gives the rewards; otherwise the recipe's reward judges the last
        answer."""
        return self.mcp is None

    @property
    def label(self) -> str:
        """The environment in a few words, for messages."""
        if self.name is not None:
            return repr(self.name)
        if self.verifiers is not None:
            return f"verifiers {self.verifiers!r}"
        return f"mcp {self.mcp.label}" if self.mcp else f"command {shlex.join(self.command)!r}"
