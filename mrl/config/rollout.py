"""Configures where samples come from: the engine, the prompts, the environments."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mrl.config.branch import Branch, one_or_several
from mrl.config.dtypes import Dtype
from mrl.config.training import ModelConfig


class EngineConfig(Branch):
    """The keys of a rollout engine, which all runs that share one have alike (docs/tenants.md)."""

    engine: str = "sglang"
    """An engine of mrl/rollout/, or your own: `path/file.py` or `package.module`, with `:NAME` where it
    is neither `Engine` nor `build_engine`."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: every rank trains, and engines take turns with the trainer on the same devices.
    `disaggregated`: the last `num_ranks` ranks lead engines only; see docs/async.md."""
    num_ranks: int | None = Field(default=None, ge=1)
    """Ranks that lead engines and do not train, a multiple of tensor_parallel_size; for
    `placement: disaggregated` only."""
    dtype: Dtype = "auto"
    """What the engine holds and computes in; `auto`: as the trainer (`model.dtype`). Weights are cast
    on the way to it, before they are digested."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that one engine spans; more than a node has, and it spans whole nodes. May be above the
    number of key/value heads, which SGLang then replicates."""
    expert_parallel_size: int = Field(default=1, ge=1)
    """Groups of the engine's ranks that share out whole experts; an expert's columns are split over
    tensor_parallel_size / expert_parallel_size ranks. SGLang's `ep_size`."""
    data_parallel_attention_size: int = Field(default=1, ge=1)
    """Replicas of the attention among the engine's ranks, each with requests and a KV cache of its own
    (DP attention: SGLang's `dp_size` with `enable_dp_attention`). For models with few key/value heads,
    or with latent attention, whose cache would be replicated by tensor parallelism."""
    context_len: int | None = Field(default=None, ge=1)
    """Prompt plus response; by default the model's max_position_embeddings."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """KV cache size in tokens; by default 16,384 on CPUs and the engine's choice on GPUs."""
    mem_fraction_static: float = Field(default=0.6, gt=0, lt=1)
    """Share of GPU memory for the engine's weights and KV cache while it is awake."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Samples that an engine works on at a time, the rest waits; by default the engine's choice."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Fields of SGLang's ServerArgs to set, by their Python names (`attention_backend: triton`), on top
    of what mrl sets. A field that mrl sets itself is refused; the message names the recipe's key."""
    batch_invariant: bool = False
    """The engine computes a request to the same bits whatever else is in its batch: requests of other
    calls or tenants, a cached prefix, a cache of another size. On CPUs in float32, for Qwen3-MoE; on
    GPUs SGLang's `enable_deterministic_inference`, which has not run. `true_on_policy` implies it."""
    return_routing_weights: bool = False
    """The engine returns the gates' weights of the captured experts too, in float32, for
    `moe.replay: ids_weights` and for the decomposition of the gap. On CPUs, with routes; 4 bytes more
    for each expert id."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for the start of an engine, its first request included. Where engines run freely,
    training begins with the first of them, and the others have this long to join."""
    request_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds for all completions of a step, or of one turn of its conversations."""
    stall_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds without a sign from an engine's scheduler after which it counts as hung and is
    replaced."""
    max_restarts: int = Field(default=3, ge=0)
    """Engines that may be lost and replaced in one step before the run gives up; with engines that run
    freely, by one worker without a finished group in between. Also the workers of a rollout rank that
    may end in a row before they join."""

    def engine_dtype(self, model: ModelConfig) -> Literal["auto", "float32", "bfloat16"]:
        """What is asked for the engine; `auto` where the device decides."""
        return model.dtype if self.dtype == "auto" else self.dtype


class RolloutConfig(EngineConfig):
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts that each step trains on."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Completions of each prompt: the size of a group."""
    max_response_len: int = Field(ge=1)
    """Most tokens of a completion, or of one turn of a conversation."""
    min_response_len: int = Field(default=0, ge=0)
    """0, or max_response_len for completions of one exact length (the end token is ignored)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, which the trainer's log-probs take into account too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1 samples come from the truncated distribution, while the log-probs of both sides stay
    those of the whole one unless `sampling_mask` is on."""
    top_k: int = -1
    """Samples come from so many of the likeliest tokens only, which is a truncation as `top_p` is; -1
    takes all."""
    sampling_mask: bool = False
    """The engine returns, for each token, the tokens that `top_p` and `top_k` kept, and the log-probs
    of both sides are those of the truncated distribution over them (DeepSeek-V3.2's "keep sampling
    mask", arXiv 2512.02556). Needs `top_k` from 2 to 4096 and SGLang 0.5.20; 4 bytes for each kept
    token."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, or a turn of a conversation. The tokens of the text that was matched
    are part of the completion: the reward sees them, and they are trained. At most 32."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion beside the model's own end-of-sequence tokens."""
    weight_bucket_mb: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Size of a weight bucket in MiB; a sync holds two of them in turn, on every rank. `auto`: a 64th
    of the model, but no less than 256 MiB (or a quarter of the model, at least 1 MiB) and no more than
    2 GiB: each bucket costs a request and a handle, whatever its size."""
    true_on_policy: bool = False
    """Trainer and engine compute the same bits: old log-probs equal the engine's, routes agree. On
    CPUs in float32, and slower; docs/on_policy.md says what it takes, and where it is refused."""
    weight_sync: Literal["tensor", "distributed", "disk"] = "tensor"
    """How weights reach the engine. `tensor`: handles to the trainer's memory (shared memory on CPUs,
    CUDA IPC on GPUs). `distributed`: a process group with the engine's ranks (gloo; refused on GPUs,
    where the engine has the trainer's, and for an engine over several nodes). `disk`: safetensors in a
    private folder of the run's folder, which all nodes of an engine must share."""
    over_sampling: float = Field(default=1.0, ge=1)
    """Prompts started for each one that the step needs. The step trains on those that finish first
    and does not wait for the slowest; 1 waits for all."""
    partial_rollouts: Literal["drop", "resume", "defer"] = "drop"
    """What becomes of the partial rollouts of prompts that were started and not needed. `drop`: they
    are given up, which favours prompts with short answers. `resume` (APRIL, arXiv 2509.18521): they
    are continued first in the next step, under its newer weights; needs `algorithm.importance`.
    `defer` (RollPacker, arXiv 2509.21009): the prompts start anew in a step that waits for all, once
    so many have gathered."""
    dynamic_sampling_rounds: int = Field(default=4, ge=1)
    """How often a step with `algorithm.dynamic_sampling` draws prompts until prompts_per_step groups
    have unequal rewards; each round draws as many as are missing. Then it trains with what there
    is."""
    canary_prompts: int = Field(default=4, ge=0)
    """Prompts whose log-probs trainer and engine must agree on after every sync; 0 turns it off."""
    canary_tolerance: float | None = Field(default=None, gt=0)
    """Mean absolute difference of their log-probs; by default 1e-3 where both are float32, and 0.1
    where one is in half precision, and a few tokens take other experts."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return one_or_several(value)

    def weight_bucket_bytes(self, model_bytes: int) -> int:
        """Bytes of a bucket, for a model whose weights are `model_bytes` as they are sent."""
        if self.weight_bucket_mb != "auto":
            return self.weight_bucket_mb << 20
        at_least = min(256 << 20, max(1 << 20, model_bytes // 4))
        return min(2 << 30, max(at_least, model_bytes // 64))

    @property
    def num_started(self) -> int:
        """Prompts that a step with over-sampling starts."""
        # Less a trifle: 10 x 1.1 is a little more than 11.
        return math.ceil(self.prompts_per_step * self.over_sampling - 1e-9)


class EnvironmentConfig(Branch):
    name: str
    """A file of mrl/environments/, or `file.py:Class`, or `package.module:Class`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the class, which is made anew for each episode."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of the policy in one episode; `rollout.max_response_len` is for each of them, and
    `rollout.context_len` for all that an episode holds."""
    time_limit_s: float = Field(default=30.0, gt=0)
    """Seconds for one answer of the environment. Where it takes longer, it is killed and the episode is
    masked."""
    num_workers: int = Field(default=1, ge=1)
    """Processes that share an engine's episodes: as many environments answer at one time."""
