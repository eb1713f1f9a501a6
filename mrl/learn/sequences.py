"""Train on token sequences that a training loop outside of mrl sends, with a factor for each token.

T tokens of a sequence, N packed tokens of a micro-batch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe.provenance import without_stale_tokens
from moe.routes import Replay
from moe.trace import joined_spans
from mrl.config import AlgorithmConfig
from mrl.exchange.rollouts import RolloutExchange
from mrl.exchange.sharing import share_bytes
from mrl.learn.batching import make_train_batches
from mrl.learn.guards import UpdateGuard, check_finite
from mrl.learn.named_losses import LossOptions, NamedLoss
from mrl.learn.packs import shared_tokens
from mrl.types import (
    UNKNOWN_VERSION,
    LossOutput,
    MicroBatch,
    RoutingTrace,
    Sample,
    TrainBatch,
    VersionSpan,
)
from parallel.mesh import Mesh
from parallel.policy import Policy
from parallel.reduce import reduce_statistics


@dataclass(frozen=True)
class Weighted:
    """A token sequence and the factor that each token has in the loss.

    Entry t of each tensor belongs to token t.
    """

    token_ids: Tensor
    """i64[T]: the token ids; T is at least 2."""
    factors: Tensor
    """f32[T]: weights or advantages. The first token and tokens with factor 0 are not in the loss."""
    old_logprobs: Tensor | None = None
    """f32[T]: the tokens' log-probs from the time when they were sampled; None if the loss does not
    need them."""
    weight: float = 1.0
    """The weight of the sequence in the loss."""
    routing: RoutingTrace | None = None
    """The engine's routes of the first T-1 tokens; None if no routes are replayed."""
    targets: Tensor | None = None
    """i64[T]: the tokens whose log-probs are in the loss, given the tokens before them; None takes
    `token_ids`."""
    in_loss: Tensor | None = None
    """bool[T]: the tokens in the loss, if they are not those with a factor other than 0."""


class Passed(NamedTuple):
    """The output of a pass over sequences, which is the same on every rank."""

    logprobs: list[list[float]]
    """T log-probs per sequence; 0 for tokens whose log-probs were not asked for."""
    metrics: dict[str, float]


@dataclass
class SequenceTrainer:
    """Computes log-probs and gradients of sequences on one rank. Every method is a collective."""

    policy: Policy
    mesh: Mesh
    exchange: RolloutExchange
    micro_batch_tokens: int
    share_prefixes: bool = False
    """Whether sequences that have the same tokens before their first token of interest (`_prompt_len`)
    share the rows of these tokens where that pays (`train.share_prefixes: auto`)."""

    def forward(self, sequences: Sequence[Weighted]) -> Passed:
        """Return the log-probs under the current weights.

        Raises NotFinite if a log-prob of a loss token is not finite.
        """
        batch, replay = self._batch(sequences)
        output = self.policy.forward_only(batch.micro_batches, replay)
        check_finite(0, "log-probs", batch.micro_batches, output.logprobs)
        return Passed(self._by_sequence(batch, output.logprobs, sequences), {})

    def compute_gradients(
        self,
        sequences: Sequence[Weighted],
        named: NamedLoss,
        options: LossOptions,
        *,
        scores_all: bool = False,
    ) -> Passed:
        """Compute the gradients of a loss, and leave them in the policy's gradient buffers. No
        optimizer step is taken. Return the log-probs and the metrics of the pass.

        scores_all: whether the log-probs of all tokens are computed, not only those of tokens in the
        loss. Raises NotFinite, on all ranks, if a log-prob, the loss or a gradient is not finite.
        """

        def loss(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
            return named.loss(logprobs, batch, options)

        batch, replay = self._batch(sequences, scores_all=scores_all)
        rows = [f"sequence {number}" for number in range(len(sequences))]
        guard = UpdateGuard(0, same_weights=False, clip=None, rows=rows)
        output = self.policy.compute_gradients(batch, guard.watch(loss), replay, guard.check)
        metrics = reduce_statistics(self.policy.statistics(output))
        if self.share_prefixes:
            metrics |= shared_tokens([batch], self.mesh)
        return Passed(self._by_sequence(batch, output.logprobs, sequences), metrics)

    def _batch(
        self, sequences: Sequence[Weighted], *, scores_all: bool = False
    ) -> tuple[TrainBatch, Replay]:
        """Pack this rank's share of the sequences into micro-batches.

        Returns the micro-batches, and which routes a pass over them replays: those of the
        sequences, or none.
        """
        groups = _groups(sequences, shared=self.share_prefixes)
        samples, stale = without_stale_tokens(
            [_sample(*group, each) for group, each in zip(groups, sequences, strict=True)]
        )
        has_routes = any(each.routing is not None for each in sequences)
        (batch,) = make_train_batches(
            [(samples, [0.0] * len(samples))],
            _Given(torch.tensor([each.weight for each in sequences])),
            self.mesh,
            self.micro_batch_tokens,
            self.exchange.deliver if has_routes else None,
            stale=stale,
            share_prefixes=self.share_prefixes,
        )
        micro_batches = [_with_factors(b, sequences, scores_all) for b in batch.micro_batches]
        replay = Replay.rollout if has_routes else Replay.off
        return dataclasses.replace(batch, micro_batches=micro_batches), replay

    def _by_sequence(
        self, batch: TrainBatch, found: Sequence[Tensor], sequences: Sequence[Weighted]
    ) -> list[list[float]]:
        """Return T values of each sequence, one per token, gathered from all ranks. A collective.

        found: f32[N] for each micro-batch of this rank, the values of its tokens.
        """
        own: dict[int, list[float]] = {}
        if self.mesh.reports_loss:
            for micro, logprobs in zip(batch.micro_batches, found, strict=True):
                for number, place in _sequence_starts(micro):
                    num_tokens = len(sequences[number].token_ids)
                    own[number] = logprobs[place : place + num_tokens].cpu().tolist()
        merged: dict[int, list[float]] = {}
        for part in filter(None, share_bytes(json.dumps(list(own.items())).encode())):
            merged |= dict(json.loads(part))
        return [merged[number] for number in range(len(sequences))]


class _Given:
    """Implements `mrl.algorithms.base.SequenceWeights` with given weights, one per sequence."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def sequence_weights(
        self,
        num_loss_tokens: Tensor,
        num_loss_tokens_total: int,
        num_samples_total: int,
        config: AlgorithmConfig,
        max_response_len: int,
    ) -> Tensor:
        return torch.where(num_loss_tokens > 0, self._weights, 0.0)


def _groups(sequences: Sequence[Weighted], *, shared: bool) -> list[tuple[int, int]]:
    """Return (number of the group, `prompt_len`) of each sequence. Sequences of a group have their
    first `prompt_len` tokens in common, and may share the rows of these. With `shared=False` each
    sequence is a group of its own."""
    if not shared:
        return [(number, 1) for number in range(len(sequences))]
    found, numbers = [], dict[tuple[bytes, ...], int]()
    for number, each in enumerate(sequences):
        prompt_len = _prompt_len(each)
        parts = [each.token_ids[:prompt_len]]
        if each.targets is not None:  # a shared row has one target
            parts.append(each.targets[:prompt_len])
            if not torch.equal(each.targets[prompt_len:], each.token_ids[prompt_len:]):
                parts.append(torch.tensor(number))
        key = tuple(part.numpy().tobytes() for part in parts)
        found.append((numbers.setdefault(key, number), prompt_len))
    return found


def _prompt_len(given: Weighted) -> int:
    """Return the number of tokens before the first one that is in the loss or was sampled (that has an
    old log-prob other than 0). It is at least 1, and less than T."""
    own = _in_loss(given)
    if given.old_logprobs is not None:
        own = own | (given.old_logprobs != 0)
    places = own[1:].nonzero()
    return int(places[0]) + 1 if len(places) else len(own) - 1


def _in_loss(given: Weighted) -> Tensor:
    in_loss = (given.factors != 0) if given.in_loss is None else given.in_loss.clone()
    in_loss[0] = False
    return in_loss


def _sample(group: int, prompt_len: int, given: Weighted) -> Sample:
    num_tokens = len(given.token_ids)
    old, routing = given.old_logprobs, given.routing
    rows = () if routing is None else routing.row_versions
    return Sample(
        group_id=group,
        token_ids=given.token_ids,
        prompt_len=prompt_len,
        loss_mask=_in_loss(given),
        rollout_logprobs=torch.zeros(num_tokens) if old is None else old,
        weight_versions=_token_versions(rows, prompt_len),
        finish_reason="length",
        routing=routing,
    )


def _token_versions(rows: Sequence[VersionSpan], prompt_len: int) -> tuple[VersionSpan, ...]:
    """Return the version spans of the tokens after the prompt, given those of the routes' rows: a token
    was sampled by the weights that computed the row before it. Rows before the prompt's last one may be
    older, as those of a cached prefix. For a row of unknown version, which is not replayed, the last
    version stands in."""
    known = [rows[-1].version if r.version == UNKNOWN_VERSION else r.version for r in rows]
    spans = [
        VersionSpan(version, max(row.start + 1, prompt_len), row.end + 1)
        for version, row in zip(known, rows, strict=True)
        if row.end + 1 > prompt_len
    ]
    return joined_spans((), spans)


def _with_factors(batch: MicroBatch, sequences: Sequence[Weighted], scores_all: bool) -> MicroBatch:
    """Return the micro-batch with the factors and the old log-probs of its tokens, f32[N], with their
    targets if some differ from the tokens, and with `scored` if log-probs of all tokens are wanted."""
    factors, targets = torch.zeros(batch.num_tokens), batch.input_ids.clone()
    scored = torch.zeros(batch.num_tokens, dtype=torch.bool)
    has_targets = False
    for number, place in _sequence_starts(batch):
        given = sequences[number]
        own = slice(place, place + len(given.token_ids))
        factors[own], scored[own] = given.factors, True
        if given.targets is not None:
            targets[own], has_targets = given.targets, True
    return dataclasses.replace(
        batch,
        token_advantages=factors,
        old_logprobs=batch.rollout_logprobs,
        targets=targets if has_targets else None,
        scored=scored if scores_all else None,
    )


def _sequence_starts(batch: MicroBatch) -> list[tuple[int, int]]:
    """Return (sequence number, index of its first token) for each sequence except the padding."""
    assert batch.sample_ids is not None
    starts = batch.cu_seqlens.tolist()
    return [(n, s) for n, s in zip(batch.sample_ids.tolist(), starts, strict=False) if n >= 0]
