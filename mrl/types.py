"""This module holds the records that flow between the rooms.

Dimensions: P prompt tokens, T all tokens of a sample, G samples a prompt, N packed tokens of a
micro-batch, B packed sequences, L MoE layers, K experts per token.

Index t of a per-token field describes token t; the first token has no log-prob, so it is 0 there.
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

NATIVE_ROUTE = -1
"""The expert id of a row without a captured route: the router decides for itself."""

UNKNOWN_VERSION = -1
"""The weight version of rows of routes where nobody can tell, and of tokens not of the policy."""


@dataclass(frozen=True)
class Prompt:
    """A prompt is one row of the prompt file."""

    prompt_id: str
    """Stable across runs: the number of the row, over all files."""
    token_ids: Tensor
    """i64[P]."""
    content: Any
    """What the row's prompt held: a string or a list of chat messages; without the beginning that
    `data.overlong: truncate_left` cut off."""
    columns: dict[str, Any]
    """Every other column of the row, `answer` and `info` among them; handed to the reward."""
    source: str
    """`file:line`, for error messages."""
    reward: str | None = None
    """A key of `DataConfig.rewards`, where its source of the data has a reward of its own."""
    source_name: str | None = None
    """The name of its source, where the data has several (`data.sources`)."""


@dataclass(frozen=True)
class VersionSpan:
    """Weights `version` made tokens (or rows of routes) [start, end) of a sample."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class RoutingTrace:
    """A trace holds the experts that the rollout engine chose for a sample. Row t routes token t.

    The last token of a sample was never fed back to the engine, so it has no row. No row repeats an
    expert: `moe.trace` refuses that in what an engine sends, and packing in what is replayed.
    """

    expert_ids: Tensor
    """u8[T-1, L, K], or u16 above 256 experts; on the `meta` device (shape without ids) where another
    rank holds them: `mrl.exchange.rollouts` brings them to the ranks that train the sample."""
    layer_numbers: tuple[int, ...]
    """Megatron's 1-based number of each of the L MoE layers."""
    num_experts: int
    row_versions: tuple[VersionSpan, ...]
    """The weights that chose each row: spans that cover all T-1 rows in order."""
    num_cached_rows: int
    """Leading rows that came from the engine's prefix cache, not from this request's prefill."""
    num_recomputed_rows: int = 0
    """Leading rows that were computed anew after the engine had retracted the request: not those that
    the log-probs of the tokens before came from."""
    expert_weights: Tensor | None = None
    """f32[T-1, L, K]: the engine's gate weights of those experts (`rollout.return_routing_weights`);
    on the `meta` device where the ids are."""

    @property
    def num_rows(self) -> int:
        """T - 1, without reading a tensor."""
        return self.row_versions[-1].end if self.row_versions else 0

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
    """A sample is one prompt with one completion."""

    group_id: int
    token_ids: Tensor
    """i64[T]: prompt, then completion; in a conversation all turns and what comes between them. On the
    `meta` device (length without ids), as the log-probs are, where another rank holds them:
    `mrl.exchange.rollouts` brings them to the ranks that train the sample."""
    prompt_len: int
    loss_mask: Tensor
    """bool[T]: true on tokens that the policy chose."""
    rollout_logprobs: Tensor
    """f32[T]: the engine's, at the sampling temperature; 0 on the prompt."""
    weight_versions: tuple[VersionSpan, ...]
    """Cover the tokens that the policy chose, in order: in a conversation not those between turns."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    routing: RoutingTrace | None = None
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(end, reward) of each turn in an environment: the tokens before `end` earned it. Empty elsewhere,
    and where the sample has no reward."""
    sampling_mask: SamplingMask | None = None
    """All tokens' sets, where `rollout_logprobs` are truncated; on the `meta` device where they are."""

    @property
    def is_held(self) -> bool:
        """Whether this rank has the tokens, and not their number alone."""
        return not self.token_ids.is_meta

    @property
    def response_ids(self) -> Tensor:
        """i64[T - prompt_len]."""
        return self.token_ids[self.prompt_len :]

    def token_versions(self) -> Tensor:
        """i32[T]: the weights that sampled each token; UNKNOWN_VERSION where the policy did not."""
        versions = torch.full((len(self.token_ids),), UNKNOWN_VERSION, dtype=torch.int32)
        for span in self.weight_versions:
            versions[span.start : span.end] = span.version
        return versions

    @property
    def num_generated(self) -> int:
        """Tokens that the policy chose, also where the sample has left the loss."""
        return sum(span.end - span.start for span in self.weight_versions)


@dataclass
class SampleGroup:
    """A group holds all samples of a prompt; rewards and advantages come after the rollout."""

    prompt: Prompt
    samples: list[Sample]
    rewards: Tensor | None = None
    """f32[G]; NaN where the reward function gave no reward or failed: masked, never scored 0."""
    advantages: Tensor | None = None
    """f32[G]: what is trained with; 0 where the reward is NaN. Where tokens have advantages of their
    own (a critic, KL in the reward) it is the mean over the sample's loss tokens."""
    texts: list[str] | None = None
    """The completions in words, where this rank has decoded them already (`mrl.data.completions`)."""
    reward_parts: dict[str, Tensor] | None = None
    """f32[G] by name: each of several rewards, and parts that a reward returned; NaN where a sample has
    none. None where there is a single reward without parts."""


@dataclass(frozen=True)
class PackedRoutes:
    """The routes of N packed tokens, a few bits an id: `mrl.kernels.routes` packs and unpacks them.

    Row t routes token t. The last token of a sequence and padding have no captured route.
    """

    packed: Tensor
    """u8[N, L, row_bytes]."""
    layer_numbers: tuple[int, ...]
    """Megatron's 1-based number of each of the L layers."""
    num_experts: int
    topk: int
    """K."""
    weights: Tensor | None = None
    """f32[N, L, K]: the engine's gate weights of those experts; of no meaning without a route."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch holds B sequences packed end to end into N tokens.

    Padding, where the layout wants it, is the last sequence: no loss, native routes.
    """

    input_ids: Tensor
    """i64[N]."""
    position_ids: Tensor
    """i64[N], restarting at 0 in each sequence."""
    cu_seqlens: Tensor
    """i32[B+1]."""
    loss_mask: Tensor
    """bool[N]."""
    rollout_logprobs: Tensor
    """f32[N]."""
    rewards: Tensor
    """f32[B]: shaped (`mrl.learn.advantages.shaped_rewards`); 0 where a sample has none."""
    seq_weight: Tensor
    """f32[B]: what one sequence counts in the loss; carries the whole global normaliser."""
    advantages: Tensor | None = None
    """f32[B], from `mrl.learn.advantages`; the mean over loss tokens where tokens have their own."""
    sample_ids: Tensor | None = None
    """i64[B]: each sample's number in its step, as lines of rollouts/step_*.jsonl; -1 for padding."""
    weight_versions: Tensor | None = None
    """i32[N]: the weights that sampled each token; UNKNOWN_VERSION where it is not the policy's."""
    routes: PackedRoutes | None = None
    old_logprobs: Tensor | None = None
    """f32[N], on the last pipeline stage."""
    ref_logprobs: Tensor | None = None
    """f32[N], on the last pipeline stage."""
    token_advantages: Tensor | None = None
    """f32[N]: take the place of `advantages`, on the last pipeline stage."""
    old_values: Tensor | None = None
    """f32[N]: the critic's before the update, on the last pipeline stage."""
    returns: Tensor | None = None
    """f32[N]: what the critic learns, on the last pipeline stage."""
    entropy: Tensor | None = None
    """f32[N] in nats, with gradient: of the current policy at each loss token, for the loss only."""
    nll_weight: Tensor | None = None
    """f32[B]: what each log-likelihood counts beside the policy loss, normaliser included."""
    version: int | None = None
    """The trainer's weights at the rollout; the staleness of a token is version - weight_versions."""
    truncated: Tensor | None = None
    """bool[B]: samples that were cut off."""
    token_rewards: Tensor | None = None
    """f32[N]: what each turn earned, at its last loss token; take the place of `rewards`."""
    bootstrap: Tensor | None = None
    """f32[B]: the critic's value of the state after the last loss token of what was cut off; else 0."""
    sampling_mask: SamplingMask | None = None
    """The sets of the N tokens, always on the CPU: all log-probs are of the truncated distribution."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()


@dataclass(frozen=True)
class TrainBatch:
    """One optimizer step's share of this data-parallel rank."""

    micro_batches: list[MicroBatch]
    num_loss_tokens: int
    """The number over all data-parallel ranks."""
    num_samples: int
    """The number over all data-parallel ranks; samples without a single loss token do not count."""


@dataclass(frozen=True)
class Mean:
    """A statistic that is reported as total / count, both summed over micro-batches and ranks."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class Sum:
    """A statistic that is reported as the sum over micro-batches and ranks."""

    value: Tensor


@dataclass(frozen=True)
class Max:
    """A statistic that is reported as the largest value over micro-batches and ranks."""

    value: Tensor


@dataclass(frozen=True)
class Quantiles:
    """A statistic reported as quantiles over micro-batches and ranks, each under a key of its own."""

    counts: Tensor
    """i64[bins], as `mrl.system.histogram` counts them."""
    reported: tuple[tuple[str, float], ...]
    """(metric key, quantile)."""


Statistic = Mean | Sum | Max | Quantiles
Statistics = dict[str, Statistic]
"""Statistics by metric key, such as `ratio/mean`."""


@dataclass(frozen=True)
class LossOutput:
    """What an algorithm makes of one micro-batch."""

    loss_sum: Tensor
    """Scalar with a gradient to `logprobs`; already weighted by `seq_weight`, never divided."""
    stats: Statistics = field(default_factory=dict)


Handle = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""(function, arguments): called in another process of the same machine it gives u8[num_bytes]."""


@dataclass(frozen=True)
class WeightBucket:
    """A bucket holds a bounded number of bytes of weights under their Hugging Face names.

    Whoever makes buckets may use the memory again for the next but one: a consumer that asks for a
    bucket is through with all but the last one that it got, and with that one too where none is left.
    """

    tensors: list[tuple[str, Tensor]]
    version: int
    flat: Tensor | None = None
    """u8[num_bytes]: all tensors end to end, where they lie in memory like that already."""
    is_last: bool = False
    """No more buckets of this version come."""
    shared_path: str | None = None
    """A file that starts with `flat`, and that other processes of this user can map: on CPUs."""
    handles: tuple[Handle, ...] | None = None
    """How each rank of an engine opens its own copy of `flat`, in rank order, where it spans several
    (`mrl.rollout.engine_group`). On GPUs each must be opened exactly once, by the rank of its place."""
    digest: dict[str, int] | None = None
    """What the trainer's own weights of this bucket add up to, by place (`mrl.kernels.digest`), taken
    before they were gathered and copied: whatever goes wrong after that is seen."""
    digest_s: float = 0.0
    """Seconds that this rank's exporter spent on digests since the bucket before this one."""

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors)
