"""Answers the `sample` operations of a session's turn."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mrl.collect.single_turn import start_groups
from mrl.config import Recipe, RolloutConfig
from mrl.config.adapter import Adapter
from mrl.errors import RunFailed
from mrl.exchange.sharing import share_bytes
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.service.sessions.bodies import SampleBody
from mrl.service.sessions.engine_samples import ENDS_TOO_OFTEN, MAX_ENDED, Drawing, Generated
from mrl.service.sessions.prompt_scores import PromptScores
from mrl.service.sessions.samplers import Source
from mrl.service.sessions.samples import Samples
from mrl.types import Prompt, Sample, SampleGroup
from parallel.mesh import Mesh
from parallel.policy import Policy

CANARY_TOKENS = 16


@dataclass(frozen=True)
class SessionModel:
    """What engines need to know of the session that they sample for."""

    name: str
    """The session's name in the engines (`mrl.service.record.engine_name`)."""
    weight: float
    """Its scheduling weight."""
    recipe: Recipe
    adapter: Adapter
    canaries: Sequence[Prompt]
    """Prompts on which the log-probs of trainer and engine are compared."""
    policy: Policy
    in_place: Callable[[Source], AbstractContextManager[None]]
    """`Samplers.in_place` of the session."""


class SessionEngines(Protocol):
    """The engines as one session uses them: on the trainer's devices (`local_sampling`) or on ranks of
    their own (`remote_sampling`)."""

    def begin(
        self, groups: Sequence[SampleGroup], how: Mapping[str, Drawing], source: Source
    ) -> None:
        """Begin to generate the groups of a turn with the weights of `source`. `how`: how they are
        drawn, by the id of their operation, which is the `source` of their prompt."""
        ...

    def finish(self) -> Generated | None:
        """Return what this rank knows of the engines' results; None on all ranks if something remains
        to be generated because an engine was lost."""
        ...

    def close(self) -> None:
        """Remove the session from the engines. Harmless when repeated."""
        ...


class SessionSampler:
    """Generates the answers that the `sample` operations of a turn ask for, on one rank of the
    trainer. Every method is a collective."""

    def __init__(
        self, recipe: Recipe, mesh: Mesh, samples: Samples, engines: SessionEngines
    ) -> None:
        """`samples` gets the routes of answers."""
        self.samples, self.engines = samples, engines
        self._recipe, self._mesh = recipe, mesh
        self._keeps_routes = recipe.captures_routes
        self._asked: list[str] = []
        """The ids of the turn's operations, until `finish` has returned their results."""
        self._how: dict[str, Drawing] = {}
        self._source = Source(None, 0, 0)
        self._num_ended = 0
        """The number of operations that have killed an engine since the session was opened, as far as
        this rank knows."""

    @property
    def has_samples(self) -> bool:
        """Whether `finish` has returned the results of all operations of the turn."""
        return not self._asked

    def begin(self, asked: Mapping[str, tuple[SampleBody, int]], source: Source) -> None:
        """Begin the `sample` operations of a turn. `asked`: the body and the seed of each
        operation, by the operation's id. `source`: the weights that sample."""
        self._asked, self._source = list(asked), source
        groups: list[SampleGroup] = []
        self._how = {}
        for name, (body, seed) in asked.items():
            prompts = [_prompt(name, i, tokens) for i, tokens in enumerate(body.prompts)]
            groups += start_groups(prompts, body.n, len(groups))
            wants = body.prompt_logprobs or body.top_prompt_logprobs > 0
            top = body.top_prompt_logprobs if wants else None
            sampling = body.sampling(self._recipe.rollout.temperature)
            self._how[name] = Drawing(sampling, seed, top)
        self.engines.begin(groups, self._how, source)

    def finish(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]] | None:
        """Return on every rank the results of the operations that succeeded and the errors of the
        other operations, both by id. Return None if some rollouts remain to be generated because an
        engine was lost."""
        if (own := self.engines.finish()) is None:
            return None
        self._num_ended += own.num_ended
        found = self._shared(own)
        asked, self._asked = self._asked, []
        groups = sorted(found.groups, key=lambda group: group.samples[0].group_id)
        results: dict[str, list[Any]] = {name: [] for name in asked if name not in found.failures}
        wanted = {name: how.top for name, how in self._how.items() if how.top is not None}
        scored: dict[str, list[PromptScores]] = {name: [] for name in wanted}
        for group in groups:
            name, number = group.prompt.source, len(results[group.prompt.source])
            results[name].append([])
            for k, sample in enumerate(group.samples):
                sample_id = f"{name}/{number}/{k}"
                if self._keeps_routes:
                    self.samples.keep(sample_id, sample)
                results[name][-1].append(_shown(sample_id, sample, self._source))
            if name in wanted:
                scored[name].append(found.scores[group.samples[0].group_id])
        shown: dict[str, dict[str, Any]] = {n: {"samples": each} for n, each in results.items()}
        for name in set(shown) & set(wanted):
            shown[name]["prompt_logprobs"] = [each.logprobs for each in scored[name]]
            if wanted[name]:
                shown[name]["top_prompt_logprobs"] = [each.top for each in scored[name]]
        return shown, found.failures

    def _shared(self, own: Generated) -> Generated:
        """Return what all ranks know, without the groups of failed operations."""
        whole = Generated()
        for said in share_bytes(json.dumps(own.notes()).encode()):
            whole.add(Generated.of_notes([], json.loads(said)))
        groups = [each for each in own.groups if each.prompt.source not in whole.failures]
        if self._mesh.dims.world > 1:
            mine = encode_groups(groups, with_routes=self._keeps_routes) if groups else b""
            parts = [decode_groups(part) for part in share_bytes(mine) if part]
            groups = [group for part in parts for group in part]
        whole.groups = groups
        return whole

    def check_behaviour(self) -> None:
        """Raise RunFailed if operations of this session have killed an engine too often."""
        if self._num_ended >= MAX_ENDED:
            raise RunFailed(ENDS_TOO_OFTEN)

    def close(self) -> None:
        """Remove the session from the engines."""
        self.engines.close()


def _prompt(name: str, number: int, tokens: Sequence[int]) -> Prompt:
    return Prompt(str(number), torch.tensor(tokens), "", {}, source=name)


def canary_prompts(vocab_size: int, config: RolloutConfig) -> list[Prompt]:
    """Return random prompts on which the log-probs of trainer and engine are compared. All sessions
    with this vocabulary and configuration get the same prompts."""
    draw = random.Random("canaries of a session")
    size = min(CANARY_TOKENS, config.context_len or CANARY_TOKENS)
    lists = [
        [draw.randrange(vocab_size) for _ in range(size)] for _ in range(config.canary_prompts)
    ]
    return [_prompt("canary", number, tokens) for number, tokens in enumerate(lists)]


def _shown(name: str, sample: Sample, source: Source) -> dict[str, Any]:
    """Return an answer as the JSON object that the client gets."""
    return {
        "id": name,
        "tokens": sample.response_ids.tolist(),
        "logprobs": sample.rollout_logprobs[sample.prompt_len :].tolist(),
        "version": source.version,
        "stop_reason": sample.finish_reason,
    }
