"""Generates the samples of a session on the service's engine, together with the requests of other
tenants."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mrl.collect.single_turn import SingleTurnRollout, start_groups
from mrl.config import Recipe, RolloutConfig
from mrl.engine_pool.part import EnginePart
from mrl.engines.base import EndsEngine, EngineLost, PolicyEndpoint, SamplingParams
from mrl.errors import InputError, RunFailed, WrongWeights
from mrl.exchange.sharing import share_bytes, sum_over_ranks
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.service.consensus import SERVICE_FAULTS
from mrl.service.sessions.bodies import SampleBody
from mrl.service.sessions.prompt_scores import PromptScores, score_prompts
from mrl.service.sessions.samplers import Source
from mrl.service.sessions.samples import Samples
from mrl.system.memory_error import out_of_memory
from mrl.types import Prompt, Sample, SampleGroup
from parallel.mesh import Mesh
from parallel.policy import Policy

CANARY_TOKENS = 16
MAX_ENDED = 3
"""A session is paused after this many of its operations have killed an engine."""
ENDS_TOO_OFTEN = (
    f"{MAX_ENDED} samples of this session have each killed the engine twice, once among others and "
    "once alone; no other is tried, and the session is paused: see the log of the engine, then "
    "resume it"
)


class SessionSampler:
    """Generates the answers that the `sample` operations of a turn ask for, on one rank of the
    trainer.

    Every method is a collective except `generate`, which runs in a thread.
    """

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        part: EnginePart,
        policy: Policy,
        samples: Samples,
        in_place: Callable[[Source], AbstractContextManager[None]],
    ) -> None:
        """`part`: the object through which the session uses this rank's engine. `samples` gets the
        routes of answers. `in_place` is `Samplers.in_place`."""
        self.samples, self._in_place = samples, in_place
        self._recipe, self._mesh, self.part, self._policy = recipe, mesh, part, policy
        tp = recipe.rollout.tensor_parallel_size
        self._number, self._num_engines = mesh.rank // tp, mesh.dims.world // tp
        self._keeps_routes = recipe.captures_routes
        self._asked: list[str] = []
        """The ids of the turn's operations, until `finish` has returned their results."""
        self._how: dict[int, tuple[SamplingParams, int]] = {}
        """The sampling parameters and the seed of each group of the turn, by group id."""
        self._left: list[SingleTurnRollout] = []
        """The rollouts that this rank's engine still has to generate, in sequence: a single rollout
        for all operations or, if that failed, one rollout for each operation."""
        self._done: list[SampleGroup] = []
        self._failures: dict[str, str] = {}
        """The errors on this rank, by operation id."""
        self._num_ended = 0
        """The number of operations that have killed an engine since the session was opened."""
        self._has_lost: set[str] = set()
        """The operations of the turn with which an engine was lost while it scored their prompts."""
        self._source, self._sends = Source(None, 0, 0), False
        self._unscored: dict[str, list[SampleGroup]] = {}
        """By operation id, the groups of this rank whose prompts' log-probs are wanted and missing."""
        self._tops: dict[str, int] = {}
        """For each operation that wants log-probs of its prompts, how many of the likeliest tokens."""
        self._prompts: dict[int, PromptScores] = {}
        """The log-probs of prompts on this rank, by group id."""
        self._is_generated = True

    @property
    def has_samples(self) -> bool:
        """Whether `finish` has returned the results of all operations of the turn."""
        return not self._asked

    @property
    def num_remaining(self) -> int:
        """1 if this rank's engine still has rollouts to generate or prompts to score, otherwise 0."""
        return int(bool(self._left or self._unscored))

    def begin(self, asked: Mapping[str, tuple[SampleBody, int]], source: Source) -> None:
        """Begin the `sample` operations of a turn. `asked`: the body and the seed of each
        operation, by the operation's id. `source`: the weights that sample."""
        self._asked, self._source = list(asked), source
        self._done, self._failures, self._left = [], {}, []
        self._unscored, self._prompts, self._has_lost = {}, {}, set()
        self._tops = {
            name: body.top_prompt_logprobs
            for name, (body, _) in asked.items()
            if body.prompt_logprobs or body.top_prompt_logprobs
        }
        self._is_generated = not asked
        groups: list[SampleGroup] = []
        how: list[tuple[SamplingParams, int]] = []
        for name, (body, seed) in asked.items():
            prompts = [_prompt(name, i, tokens) for i, tokens in enumerate(body.prompts)]
            groups += start_groups(prompts, body.n, len(groups))
            how += [(body.sampling(self._recipe.rollout.temperature), seed)] * len(prompts)
        self._how = dict(enumerate(how))
        share = groups[self._number :: self._num_engines]
        if self.part.endpoint is not None and share:
            self._left = [self._rollout(share)]
            for group in share:
                if group.prompt.source in self._tops:
                    self._unscored.setdefault(group.prompt.source, []).append(group)
        self.part.is_needed = bool(self.num_remaining)

    def _rollout(self, groups: Sequence[SampleGroup]) -> SingleTurnRollout:
        how = [self._how[group.samples[0].group_id] for group in groups]
        return SingleTurnRollout(groups, [one for one, _ in how], [seed for _, seed in how])

    def prepare_sync(self) -> None:
        """Find out whether any engine lacks the current version of the weights. If so, compute the
        trainer's log-probs of the canary prompts, with which `check_sync` compares the engine's.
        The base model must be on the device."""
        self._policy.mount(adapter_only=True)
        endpoint = self.part.active_endpoint
        lacks = endpoint is not None and endpoint.weight_version != self._source.label
        self._sends = bool(sum_over_ranks(lacks))
        if not self._sends:
            return
        try:
            with self._in_place(self._source):
                self.part.prepare_sync(self._policy)
        except InputError as error:  # on all ranks: the sampler cannot be read
            self._failures = dict.fromkeys(self._asked, " ".join(str(error).split()))
            self._left, self._unscored, self._sends = [], {}, False

    def send(self) -> None:
        """Send the adapter to the engine, which must be awake. Does nothing if every engine has the
        current version."""
        self._policy.mount(adapter_only=True)
        if self._sends:
            with self._in_place(self._source):
                self.part.send(self._policy, self._source.label)
            self.part.raise_failures()

    def check_sync(self) -> None:
        """If the adapter was sent, compare the engine's log-probs of the canary prompts with the
        trainer's. Raises RunFailed if the log-probs differ too much. The engine's KV cache must be
        awake."""
        if self._sends:
            self.part.check_sync()

    def generate(self) -> None:
        """Generate the remaining rollouts; stop early if the engine is lost. If the engine refuses
        an operation, only that operation fails: see `finish`. Raises errors that end the service,
        and WrongWeights."""
        if (endpoint := self.part.active_endpoint) is None:
            return
        with self.part.engine.noting_loss():
            while self._left:
                self._generate(endpoint, self._left[0])
            while self._unscored:
                self._score(endpoint, next(iter(self._unscored)))
        if self._left:  # the engine was lost: try each alone, as one of them may be the cause
            self._left = [each for rollout in self._left for each in self._one_by_one(rollout)]

    def _generate(self, endpoint: PolicyEndpoint, rollout: SingleTurnRollout) -> None:
        """Generate the rest of a rollout, and remove the rollout from `_left`. If generation fails,
        the rollout is replaced by one rollout for each of its unfinished operations; if there is
        only one such operation, its error is recorded instead."""
        parts: list[SingleTurnRollout] = []
        try:
            for group in rollout.finished(endpoint):
                self._done.append(group)
        except (*SERVICE_FAULTS, WrongWeights):
            raise  # not the fault of one operation
        except (ValueError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            parts = self._one_by_one(rollout)
            if len(parts) == 1:
                self._fail(parts.pop(), error)
        self._left[:1] = parts

    def _score(self, endpoint: PolicyEndpoint, name: str) -> None:
        """Compute the log-probs of this rank's prompts of one operation, unless it has failed."""
        groups = self._unscored[name] if name not in self._failures else []
        try:
            found = score_prompts(
                endpoint, [group.prompt.token_ids for group in groups], self._tops[name]
            )
        except EngineLost as error:
            if name in self._has_lost:  # otherwise it is tried once more, on the next engine
                self._failures[name] = " ".join(str(error).split())
                self._num_ended += 1
                del self._unscored[name]
            self._has_lost.add(name)
            raise
        except (*SERVICE_FAULTS, WrongWeights):
            raise
        except (ValueError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            self._failures[name] = " ".join(str(error).split())
            del self._unscored[name]
            return
        ids = [group.samples[0].group_id for group in groups]
        self._prompts |= dict(zip(ids, found, strict=True))
        del self._unscored[name]

    def _one_by_one(self, rollout: SingleTurnRollout) -> list[SingleTurnRollout]:
        """Return one rollout for each operation that is unfinished in `rollout`."""
        parts: dict[str, list[SampleGroup]] = {}
        for group in rollout.partial:
            parts.setdefault(group.prompt.source, []).append(group)
        return [self._rollout(groups) for groups in parts.values()]

    def _fail(self, rollout: SingleTurnRollout, error: Exception) -> None:
        """Record the error of the only operation of `rollout`. After MAX_ENDED operations that
        killed an engine, the remaining operations fail without being tried."""
        self._failures[rollout.partial[0].prompt.source] = " ".join(str(error).split())
        if not isinstance(error, EndsEngine):
            return
        self._num_ended += 1
        if self._num_ended >= MAX_ENDED:
            for each in self._left[1:]:
                for group in each.partial:
                    self._failures.setdefault(group.prompt.source, ENDS_TOO_OFTEN)
            del self._left[1:]

    def end_generation(self, *, was_lost: bool) -> None:
        """Determine whether all ranks have generated everything; `finish` uses the result.
        `was_lost`: whether any engine was lost."""
        self.part.is_needed = bool(self.num_remaining)
        self._is_generated = not (was_lost and sum_over_ranks(self.part.is_needed))

    def finish(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]] | None:
        """Return on every rank the results of the operations that succeeded and the errors of the
        other operations, both by id. Return None if some rollouts remain to be generated because an
        engine was lost."""
        if not self._is_generated:
            return None
        failures: dict[str, str] = {}
        prompts: dict[int, PromptScores] = {}
        own = [self._failures, list(self._prompts.items())]
        for said in share_bytes(json.dumps(own).encode()):
            some, scores = json.loads(said)
            failures = some | failures
            prompts |= {number: PromptScores(*each) for number, each in scores}
        asked, self._asked, self._left = self._asked, [], []
        groups = [each for each in self._done if each.prompt.source not in failures]
        if self._mesh.dims.world > 1:
            mine = encode_groups(groups, with_routes=self._keeps_routes) if groups else b""
            parts = [decode_groups(part) for part in share_bytes(mine) if part]
            groups = [group for part in parts for group in part]
        groups = sorted(groups, key=lambda group: group.samples[0].group_id)
        results: dict[str, list[Any]] = {name: [] for name in asked if name not in failures}
        scored: dict[str, list[PromptScores]] = {name: [] for name in self._tops}
        for group in groups:
            name, number = group.prompt.source, len(results[group.prompt.source])
            results[name].append([])
            for k, sample in enumerate(group.samples):
                sample_id = f"{name}/{number}/{k}"
                if self._keeps_routes:
                    self.samples.keep(sample_id, sample)
                results[name][-1].append(_shown(sample_id, sample, self._source))
            if name in self._tops:
                scored[name].append(prompts[group.samples[0].group_id])
        shown: dict[str, dict[str, Any]] = {n: {"samples": each} for n, each in results.items()}
        for name in set(shown) & set(self._tops):
            shown[name]["prompt_logprobs"] = [each.logprobs for each in scored[name]]
            if self._tops[name]:
                shown[name]["top_prompt_logprobs"] = [each.top for each in scored[name]]
        return shown, failures

    def check_behaviour(self) -> None:
        """Raise RunFailed if operations of this session have killed this rank's engine too
        often."""
        if self._num_ended >= MAX_ENDED:
            raise RunFailed(ENDS_TOO_OFTEN)

    def close(self) -> None:
        """Remove the session from the engine."""
        self.part.release()


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
