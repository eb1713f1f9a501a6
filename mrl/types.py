"""Records that the packages exchange.

Dimensions: P prompt tokens, T all tokens of a sample, G samples per prompt, N packed tokens of a
micro-batch, B packed sequences, L MoE layers, K experts per token.

Index t of a per-token field describes token t. The first token has no log-prob; its entry is 0.
`rollout_logprobs` (engine), `old_logprobs` (trainer before the update), `ref_logprobs` (frozen
reference) and `logprobs` (current policy) are four different numbers and never share a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mrl.sampling_mask import SamplingMask
from mrl.shared_prefixes import SharedPrefixes

NATIVE_ROUTE = -1
"""Expert id of a row without a captured route; the trainer's router then chooses the experts."""
UNKNOWN_VERSION = -1
"""Weight version of tokens that the policy did not sample, and of route rows of unknown version."""


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt file."""

    prompt_id: str
    """The row's number as a string, counted from 0 over all files. It is the same in every run."""
    token_ids: Tensor  # i64[P]
    content: Any
    """The prompt: a string, or a list of chat messages. `data.overlong` may have truncated it."""
    columns: dict[str, Any]
    """All other columns of the row, such as `answer` and `info`; the reward receives them."""
    source: str  # `file:line`, for error messages
    reward: str | None = None  # key into `DataConfig.rewards`, if the data source has its own
    source_name: str | None = None  # the prompt's data source, if there are several


@dataclass(frozen=True)
class VersionSpan:
    """A range [start, end) of a sample's tokens or route rows, all produced by one weight version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class RoutingTrace:
    """The experts that the rollout engine chose for a sample. Row t is the route of token t.

    The last token of a sample was never fed back, so it has no row. No row repeats an expert.
    """

    expert_ids: Tensor
    """u8[T-1, L, K], or u16 above 256 experts. A `meta` tensor if another rank has the ids;
    `mrl.exchange.rollouts` sends them to the ranks that train the sample."""
    layer_numbers: tuple[int, ...]
    """Megatron's 1-based number of each of the L MoE layers."""
    num_experts: int
    row_versions: tuple[VersionSpan, ...]
    """Spans that cover all T-1 rows in order, each with the weight version that chose its rows."""
    num_cached_rows: int
    """Number of leading rows taken from the engine's prefix cache, not computed for this request."""
    num_recomputed_rows: int = 0
    """Number of leading rows that the engine computed again after it retracted the request. The
    log-probs of these tokens may be from before the retraction, with other routes."""
    expert_weights: Tensor | None = None
    """f32[T-1, L, K]: gate weights, if `rollout.return_routing_weights`; on `meta` if the ids are."""

    @property
    def num_rows(self) -> int:
        """The number of rows, T - 1. It is known even if another rank has the ids."""
        return self.row_versions[-1].end if self.row_versions else 0

    @property
    def num_bytes(self) -> int:
        """The size in bytes of the ids and weights in this process; 0 if another rank has them."""
        tensors = [each for each in (self.expert_ids, self.expert_weights) if each is not None]
        return sum(each.nbytes for each in tensors if not each.is_meta)

    def __post_init__(self) -> None:
        ids, shape = self.expert_ids, tuple(self.expert_ids.shape)
        if len(shape) != 3 or shape[1] != len(self.layer_numbers):
            raise ValueError(
                f"RoutingTrace.expert_ids: expected [T-1, {len(self.layer_numbers)} layers, K], "
                f"got {shape}"
            )
        ends = [0, *(span.end for span in self.row_versions)]
        if [span.start for span in self.row_versions] != ends[:-1] or ends[-1] != shape[0]:
            raise ValueError(
                f"RoutingTrace.row_versions: expected spans that cover {shape[0]} rows in order, got "
                f"{[(span.version, span.start, span.end) for span in self.row_versions]}"
            )
        if ids.dtype not in (torch.uint8, torch.uint16):
            raise ValueError(f"RoutingTrace.expert_ids: expected uint8 or uint16, got {ids.dtype}")
        weights = self.expert_weights
        if weights is not None and (weights.shape, weights.dtype) != (ids.shape, torch.float32):
            raise ValueError(
                f"RoutingTrace.expert_weights: expected float32 {list(shape)}, as the ids, got "
                f"{weights.dtype} {list(weights.shape)}"
            )
        if 0 in shape or ids.is_meta:
            return
        largest = int(ids.max() if ids.dtype == torch.uint8 else ids.to(torch.int32).max())
        if largest >= self.num_experts:
            raise ValueError(
                f"RoutingTrace.expert_ids: expert {largest} is out of range, the model has "
                f"{self.num_experts} experts"
            )


@dataclass(frozen=True)
class Sample:
    """One completion of a prompt."""

    group_id: int
    token_ids: Tensor
    """i64[T]: prompt and completion, or a whole conversation. On ranks without the tokens, this is
    a `meta` tensor (as are `rollout_logprobs` and `sampling_mask`) until `mrl.exchange.rollouts`
    sends the tokens."""
    prompt_len: int
    loss_mask: Tensor
    """bool[T]: true for tokens that the policy sampled."""
    rollout_logprobs: Tensor
    """f32[T]: the engine's log-probs at the sampling temperature; 0 on the prompt."""
    weight_versions: tuple[VersionSpan, ...]
    """Spans of the tokens that the policy sampled, in order. Tokens between turns have no span."""
    finish_reason: str
    """Why the sample ended: `stop`, `length` or `abort`."""
    routing: RoutingTrace | None = None
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(end, reward) of each turn: the turn's last token has index `end` - 1. Empty without turns."""
    sampling_mask: SamplingMask | None = None
    """Tokens that `top_p` and `top_k` kept per position, with `rollout.sampling_mask`; else None."""

    @property
    def is_held(self) -> bool:
        """Whether this rank has the token ids themselves, rather than only their number."""
        return not self.token_ids.is_meta

    @property
    def response_ids(self) -> Tensor:
        """i64[T - prompt_len]: the tokens after the prompt."""
        return self.token_ids[self.prompt_len :]

    def token_versions(self) -> Tensor:
        """Return i32[T]: the weight version of each token; UNKNOWN_VERSION if it was not sampled."""
        versions = torch.full((len(self.token_ids),), UNKNOWN_VERSION, dtype=torch.int32)
        for span in self.weight_versions:
            versions[span.start : span.end] = span.version
        return versions

    @property
    def num_generated(self) -> int:
        """Number of tokens that the policy sampled, even if the sample is excluded from the loss."""
        return sum(span.end - span.start for span in self.weight_versions)


@dataclass
class SampleGroup:
    """All samples of a prompt. Rewards and advantages are filled in after the rollout."""

    prompt: Prompt
    samples: list[Sample]
    rewards: Tensor | None = None
    """f32[G]; NaN, not 0, if the reward function failed or returned no reward."""
    advantages: Tensor | None = None
    """f32[G]: the advantages used in training; 0 if the reward is NaN. If tokens have their own
    advantages (a critic, KL in the reward), this is the mean over the sample's loss tokens."""
    episodes: tuple[int, ...] | None = None
    """The episode, from 0, of each sample, if samples are branches of episodes that share a reward."""
    texts: list[str] | None = None
    """The decoded completions; None if this rank has not decoded them (`mrl.data.completions`)."""
    reward_parts: dict[str, Tensor] | None = None
    """The values f32[G] of each part of the reward, by name, or None; NaN if a sample lacks it."""
    answers: list[str] | None = None  # what reward functions judge instead of `texts`


@dataclass(frozen=True)
class TokenRoutes:
    """The experts to which N tokens are routed; row t belongs to token t."""

    expert_ids: Tensor
    """u8[N, L, K], or u16 above 256 experts; undefined in rows without a captured route."""
    captured: Tensor
    """bool[N]: true for tokens with a captured route; the trainer's routers route the others."""
    layer_numbers: tuple[int, ...]
    """Megatron's 1-based number of each of the L layers."""
    num_experts: int
    weights: Tensor | None = None
    """f32[N, L, K]: the engine's gate weights; undefined for tokens without a route."""


@dataclass(frozen=True)
class MicroBatch:
    """B sequences packed end to end into N tokens. If the layout needs padding, the last sequence
    is padding, without loss tokens or captured routes."""

    input_ids: Tensor
    """i64[N]: the token ids."""
    position_ids: Tensor
    """i64[N], restarting at 0 in each sequence."""
    cu_seqlens: Tensor
    """i32[B+1]: the index of each sequence's first token; the last entry is N."""
    loss_mask: Tensor
    """bool[N]: true for the loss tokens."""
    rollout_logprobs: Tensor
    """f32[N]: the engine's log-probs."""
    rewards: Tensor
    """f32[B]: rewards after shaping (`mrl.algorithms.dapo.shaped_rewards`); 0 without a reward."""
    seq_weight: Tensor
    """f32[B]: weight of each sequence in the loss, already divided by the global normaliser."""
    advantages: Tensor | None = None
    """f32[B]: the advantage of each sequence, or the mean over its loss tokens if there are
    `token_advantages`. None until `mrl.learn.advantages` has run."""
    sample_ids: Tensor | None = None
    """i64[B]: number of each sample in its step (line of rollouts/step_*.jsonl); -1 for padding."""
    weight_versions: Tensor | None = None
    """i32[N]: weight version of each token; UNKNOWN_VERSION if the policy did not sample it."""
    routes: TokenRoutes | None = None
    old_logprobs: Tensor | None = None
    """f32[N]: the policy's log-probs before the update, on the last pipeline stage."""
    ref_logprobs: Tensor | None = None
    """f32[N]: the frozen reference model's log-probs, on the last pipeline stage."""
    token_advantages: Tensor | None = None
    """f32[N]: one advantage per token, on the last pipeline stage; replaces `advantages` if given."""
    old_values: Tensor | None = None  # f32[N]: the critic's, before the update, on the last stage
    returns: Tensor | None = None
    """f32[N]: the critic's targets, on the last pipeline stage."""
    entropy: Tensor | None = None
    """f32[N] in nats, with gradient: the current policy's entropy; set while the loss is computed."""
    router_shift: Tensor | None = None
    """f32[N]: how far the routers moved (`moe.router_shift`); set while the loss is computed."""
    nll_weight: Tensor | None = None
    """f32[B]: weight of each sequence's log-likelihood term in the loss, already normalised."""
    version: int | None = None
    """Version of the weights before the update; a token's staleness is `version - weight_versions`."""
    truncated: Tensor | None = None
    """bool[B]: true for samples that ended at the length limit."""
    token_rewards: Tensor | None = None
    """f32[N]: each turn's reward at its last loss token, else 0; replaces `rewards` if given."""
    bootstrap: Tensor | None = None
    """f32[B]: the critic's value after the last loss token of truncated samples, else 0."""
    sampling_mask: SamplingMask | None = None
    """Tokens kept at each of the N positions, on the CPU, with `rollout.sampling_mask`; else None."""
    shared: SharedPrefixes | None = None
    """Rows that sequences share; None if the model computes a row for every token."""
    targets: Tensor | None = None
    """i64[N]: the tokens whose log-probs are computed, at their indices; None takes `input_ids`."""
    scored: Tensor | None = None
    """bool[N]: true where a log-prob is computed; None takes `loss_mask`, which it must contain."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()


@dataclass(frozen=True)
class TrainBatch:
    """The data of one optimizer step that this data-parallel rank trains on."""

    micro_batches: list[MicroBatch]
    num_loss_tokens: int  # over all data-parallel ranks
    num_samples: int
    """Number of samples with at least one loss token, over all data-parallel ranks."""


@dataclass(frozen=True)
class Mean:
    """A statistic reported as total / count, both summed over micro-batches and ranks."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class Sum:
    """A statistic reported as its sum over micro-batches and ranks."""

    value: Tensor


@dataclass(frozen=True)
class Max:
    """A statistic reported as its maximum over micro-batches and ranks."""

    value: Tensor


@dataclass(frozen=True)
class Quantiles:
    """A statistic reported as quantiles over micro-batches and ranks, one metric key per quantile."""

    counts: Tensor
    """i64[bins]: a histogram of the values (`mrl.system.histogram`)."""
    reported: tuple[tuple[str, float], ...]
    """A pair (metric key, quantile in [0, 1]) for each quantile that is reported."""


Statistic = Mean | Sum | Max | Quantiles
Statistics = dict[str, Statistic]
"""Statistics by metric key, such as `ratio/mean`."""


@dataclass(frozen=True)
class LossOutput:
    """The loss and the statistics of one micro-batch."""

    loss_sum: Tensor
    """Scalar with gradient: the sum of the token losses times `seq_weight`, already normalised."""
    stats: Statistics = field(default_factory=dict)


Handle = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A function and its arguments. Called by another process of this machine, it gives u8[num_bytes]."""


@dataclass(frozen=True)
class WeightBucket:
    """A part of the weights, of bounded size in bytes, under their Hugging Face names. Two buffers
    alternate, so bucket n + 2 overwrites bucket n: a consumer must have finished with bucket n before
    it asks for bucket n + 2, and with all buckets when the iteration ends."""

    tensors: list[tuple[str, Tensor]]
    version: int
    flat: Tensor | None = None
    """u8[num_bytes]: all tensors end to end, if they are already contiguous in memory."""
    is_last: bool = False
    """Whether this is the last bucket of its version."""
    shared_path: str | None = None
    """On CPUs: a file that begins with `flat` and that other processes of this user can map."""
    handles: tuple[Handle, ...] | None = None
    """One handle for each rank of an engine, in rank order. A handle opens its rank's own copy of
    `flat` (`mrl.weight_sync.engine_group`). On GPUs each rank must open its handle exactly once."""
    digest: dict[str, int] | None = None
    """Digests by module (`mrl.kernels.digest`) that an engine's weights must have after loading."""
    sent_digest: dict[str, int] | None = None  # if `tensors` are not what an engine holds
    digest_s: float = 0.0
    """Seconds that this rank's exporter spent on digests since the previous bucket."""

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors)
