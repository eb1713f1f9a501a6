"""Holds a conversation as token ids. Training uses the engine's token ids and never re-tokenizes
text.

A conversation grows by completions of an engine, and by tokens of a tool, an environment or a
template. Only the tokens of completions are loss tokens. The engine receives only token ids.

Dimensions: P prompt tokens, T all tokens so far, R rows of routes so far, L MoE layers, K experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe.trace import join_traces
from mrl.engines.base import Completion
from mrl.sampling_mask import SamplingMask, join_masks
from mrl.types import RoutingTrace, Sample, VersionSpan

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Conversation:
    """An unfinished sample. It is immutable: a method that extends it returns a new
    conversation."""

    group_id: int
    token_ids: Tensor
    """i64[T]: the ids of all tokens so far."""
    prompt_len: int
    loss_mask: Tensor
    """bool[T]: true for tokens that the policy chose."""
    rollout_logprobs: Tensor
    """f32[T]: the engine's log-probs of the loss tokens; 0 for all other tokens."""
    weight_versions: tuple[VersionSpan, ...] = ()
    """Spans of loss tokens, each with the version of the weights that sampled it. In order, they cover
    all loss tokens."""
    routing: RoutingTrace | None = None
    """The routes of all tokens before the last token of the last completion."""
    turn_ends: tuple[int, ...] = ()
    """For each completion that has tokens, the length of the conversation at its end."""
    sampling_mask: SamplingMask | None = None
    """The tokens that `top_p` and `top_k` kept when each token was sampled; None if the engine does
    not return them."""
    finish_reason: FinishReason | None = None
    """Why the conversation ended; None if it has not ended yet."""

    @property
    def num_turns(self) -> int:
        """Number of completions so far that have tokens."""
        return len(self.turn_ends)

    @staticmethod
    def start(group_id: int, prompt_ids: Tensor) -> Conversation:
        """Return a conversation that consists of a prompt i64[P]."""
        none = torch.zeros(len(prompt_ids), dtype=torch.bool)
        return Conversation(group_id, prompt_ids, len(prompt_ids), none, none.float())

    def with_completion(self, completion: Completion) -> Conversation:
        """Append a completion as the policy's next turn. An aborted completion ends the
        conversation.

        Raises ValueError if the completion has no tokens although it was not aborted, if its
        version spans do not cover exactly its tokens, or if its routes have the wrong number of
        rows. Also raises ValueError if only some turns of the conversation have routes.
        """
        new = completion.output_ids
        if completion.finish_reason == "abort" and not len(new):
            return self.finished("abort")
        start, end = len(self.token_ids), len(self.token_ids) + len(new)
        spans = completion.weight_versions
        covered = (spans[0].start, spans[-1].end) if spans else None
        if start == end or covered != (start, end):
            raise ValueError(
                f"completion {completion.request_id}: its weight versions cover tokens {covered}, "
                f"expected {(start, end)} and at least one token"
            )
        longer = dataclasses.replace(
            self._longer(new, completion.logprobs, completion.sampling_mask),
            weight_versions=(*self.weight_versions, *spans),
            routing=self._routes(completion.routing, end - 1),
            turn_ends=(*self.turn_ends, end),
        )
        return longer.finished("abort") if completion.finish_reason == "abort" else longer

    def with_tokens(self, token_ids: Tensor) -> Conversation:
        """Append tokens i64[n] of a tool, an environment or a template. They are not loss tokens
        and have log-prob 0."""
        return self._longer(token_ids, None)

    def sharing(self, longer: Conversation) -> Conversation:
        """Return this conversation in the memory of `longer`, which continues it. Routes and sampling
        mask are outlines on the device `meta`, which `restored` fills."""
        size, routing = len(self.token_ids), self.routing
        if routing is not None:
            weights = routing.expert_weights
            routing = dataclasses.replace(
                routing,
                expert_ids=routing.expert_ids.to("meta"),
                expert_weights=None if weights is None else weights.to("meta"),
            )
        return dataclasses.replace(
            self,
            token_ids=longer.token_ids[:size],
            loss_mask=longer.loss_mask[:size],
            rollout_logprobs=longer.rollout_logprobs[:size],
            routing=routing,
            sampling_mask=self.sampling_mask and self.sampling_mask.outline(),
        )

    def restored(self, longer: Conversation) -> Conversation:
        """Return this conversation with the routes and sampling mask of its tokens in `longer`, which
        continues it."""
        routing, mask = self.routing, self.sampling_mask
        if routing is not None:
            assert longer.routing is not None
            weights = longer.routing.expert_weights
            routing = dataclasses.replace(
                routing,
                expert_ids=longer.routing.expert_ids[: routing.num_rows],
                expert_weights=None if weights is None else weights[: routing.num_rows],
            )
        if mask is not None:
            assert longer.sampling_mask is not None
            mask = longer.sampling_mask.cut(mask.num_tokens)
        return dataclasses.replace(self, routing=routing, sampling_mask=mask)

    def finished(self, reason: FinishReason) -> Conversation:
        """Return the conversation as ended, with this finish reason."""
        return dataclasses.replace(self, finish_reason=reason)

    def sample(self, weight_version: int, rewards: Sequence[float] = ()) -> Sample:
        """Return the sample to train on. Tokens after the last loss token are left out.

        If the conversation has no loss token, the sample gets an empty span of version
        `weight_version`. `rewards` has one reward for each turn, or is empty. Raises ValueError if
        the conversation has not ended, or if the number of rewards is wrong.
        """
        if self.finish_reason is None:
            raise ValueError("sample() of a conversation that is not finished")
        chosen = self.loss_mask.nonzero()
        end = int(chosen[-1]) + 1 if len(chosen) else self.prompt_len
        none = (VersionSpan(weight_version, end, end),)
        return Sample(
            group_id=self.group_id,
            token_ids=self.token_ids[:end],
            prompt_len=self.prompt_len,
            loss_mask=self.loss_mask[:end],
            rollout_logprobs=self.rollout_logprobs[:end],
            weight_versions=self.weight_versions or none,
            finish_reason=self.finish_reason,
            routing=self.routing,
            sampling_mask=self.sampling_mask and self.sampling_mask.cut(end),
            turn_rewards=tuple(zip(self.turn_ends, rewards, strict=True)) if rewards else (),
        )

    def _longer(
        self, token_ids: Tensor, logprobs: Tensor | None, mask: SamplingMask | None = None
    ) -> Conversation:
        zeros = torch.zeros(len(token_ids), dtype=torch.float32)
        chosen = torch.full((len(token_ids),), logprobs is not None)
        more = zeros if logprobs is None else logprobs
        return dataclasses.replace(
            self,
            token_ids=torch.cat([self.token_ids, token_ids]),
            loss_mask=torch.cat([self.loss_mask, chosen]),
            rollout_logprobs=torch.cat([self.rollout_logprobs, more]),
            sampling_mask=join_masks(
                [(self.sampling_mask, len(self.token_ids)), (mask, len(token_ids))]
            ),
        )

    def _routes(self, new: RoutingTrace | None, num_rows: int) -> RoutingTrace | None:
        if self.num_turns and (new is None) != (self.routing is None):
            given, before = ("no routes", "had") if new is None else ("routes", "had not")
            raise ValueError(f"the completion has {given}, where the turns before {before}")
        if new is not None and len(new.expert_ids) != num_rows:
            raise ValueError(f"routes: got {len(new.expert_ids)} rows, expected {num_rows}")
        return new if new is None or self.routing is None else join_traces(self.routing, new)
