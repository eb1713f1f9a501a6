"""Generates what the `sample` operations of a turn ask of one engine. This module imports no Megatron:
rollout ranks use it, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from mrl.collect.single_turn import SingleTurnRollout
from mrl.engines.base import EndsEngine, EngineLost, PolicyEndpoint
from mrl.engines.sampling import SamplingParams
from mrl.errors import WrongWeights
from mrl.service.consensus import SERVICE_FAULTS, describe
from mrl.service.sessions.prompt_scores import PromptScores, score_prompts
from mrl.system.memory_error import out_of_memory
from mrl.types import SampleGroup

MAX_ENDED = 3
"""A session is paused after this many of its operations have killed an engine."""
ENDS_TOO_OFTEN = (
    f"{MAX_ENDED} samples of this session have each killed the engine twice, once among others and "
    "once alone; no other is tried, and the session is paused: see the log of the engine, then "
    "resume it"
)


class Drawing(NamedTuple):
    """How the samples of one operation are drawn."""

    sampling: SamplingParams
    seed: int
    top: int | None
    """How many of the likeliest tokens are wanted in the place of each token of the prompts; None if no
    log-probs of the prompts are wanted."""

    def as_json(self) -> list[Any]:
        return [asdict(self.sampling), self.seed, self.top]

    @classmethod
    def of_json(cls, given: Sequence[Any]) -> Drawing:
        sampling, seed, top = given
        lists = {key: tuple(sampling[key]) for key in ("stop", "stop_token_ids")}
        return cls(SamplingParams(**{**sampling, **lists}), seed, top)


@dataclass
class Generated:
    """What engines have found for the operations of a turn."""

    groups: list[SampleGroup] = field(default_factory=list)
    """The complete groups. The prompt of each has the id of its operation as `source`."""
    failures: dict[str, str] = field(default_factory=dict)
    """The errors, by operation id."""
    scores: dict[int, PromptScores] = field(default_factory=dict)
    """The log-probs of prompts, by group id."""
    num_ended: int = 0
    """The number of operations that have killed an engine."""

    def add(self, other: Generated) -> None:
        """Add what another engine has found."""
        self.groups += other.groups
        self.failures |= other.failures
        self.scores |= other.scores
        self.num_ended += other.num_ended

    def notes(self) -> dict[str, Any]:
        """Return everything but the groups as a JSON object."""
        return {
            "failures": self.failures,
            "scores": list(self.scores.items()),
            "num_ended": self.num_ended,
        }

    @classmethod
    def of_notes(cls, groups: list[SampleGroup], notes: Mapping[str, Any]) -> Generated:
        """Return what `notes` has made an object of, with these groups."""
        scores = {int(number): PromptScores(*each) for number, each in notes["scores"]}
        return cls(groups, dict(notes["failures"]), scores, int(notes["num_ended"]))


class EngineSamples:
    """The part of one engine in a turn. `run` is called again, with another engine, if one is lost."""

    def __init__(
        self, groups: Sequence[SampleGroup], how: Mapping[str, Drawing], num_ended: int = 0
    ) -> None:
        """`groups`: the groups to generate. `how`: how they are drawn, by operation id. `num_ended`:
        how many operations of the session have killed an engine before."""
        self._how, self._ended_before = how, num_ended
        self._found = Generated()
        self._left = [self._rollout(groups)] if groups else []
        """The rollouts that are still to be generated, in sequence: a single rollout for all
        operations or, if that failed, one rollout for each operation."""
        self._unscored: dict[str, list[SampleGroup]] = {}
        """By operation id, the groups whose prompts' log-probs are wanted and missing."""
        for group in groups:
            if how[group.prompt.source].top is not None:
                self._unscored.setdefault(group.prompt.source, []).append(group)
        self._has_lost: set[str] = set()
        """The operations with which an engine was lost while it scored their prompts."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to generate or to score."""
        return not (self._left or self._unscored)

    def run(self, endpoint: PolicyEndpoint) -> None:
        """Generate and score what is left. If the engine refuses an operation, only that operation
        fails. Raises EngineLost, errors that end the service, and WrongWeights."""
        try:
            while self._left:
                self._generate(endpoint, self._left[0])
            while self._unscored:
                self._score(endpoint, next(iter(self._unscored)))
        except EngineLost:  # try each alone, as one of them may be the cause
            self._left = [each for rollout in self._left for each in self._one_by_one(rollout)]
            raise

    def finish(self) -> Generated:
        """Return what was found. Of a failed operation, there may be groups."""
        return self._found

    def _rollout(self, groups: Sequence[SampleGroup]) -> SingleTurnRollout:
        how = [self._how[group.prompt.source] for group in groups]
        return SingleTurnRollout(groups, [one.sampling for one in how], [one.seed for one in how])

    def _generate(self, endpoint: PolicyEndpoint, rollout: SingleTurnRollout) -> None:
        """Generate the rest of a rollout, and remove the rollout from `_left`. If generation fails,
        the rollout is replaced by one rollout for each of its unfinished operations; if there is
        only one such operation, its error is recorded instead."""
        parts: list[SingleTurnRollout] = []
        try:
            for group in rollout.finished(endpoint):
                self._found.groups.append(group)
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
        """Compute the log-probs of the prompts of one operation, unless it has failed."""
        failures = self._found.failures
        groups = self._unscored[name] if name not in failures else []
        try:
            found = score_prompts(
                endpoint, [group.prompt.token_ids for group in groups], self._how[name].top or 0
            )
        except EngineLost as error:
            if name in self._has_lost:  # otherwise it is tried once more, on the next engine
                failures[name] = describe(error)
                self._found.num_ended += 1
                del self._unscored[name]
            self._has_lost.add(name)
            raise
        except (*SERVICE_FAULTS, WrongWeights):
            raise
        except (ValueError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            failures[name] = describe(error)
            del self._unscored[name]
            return
        ids = [group.samples[0].group_id for group in groups]
        self._found.scores |= dict(zip(ids, found, strict=True))
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
        failures = self._found.failures
        failures[rollout.partial[0].prompt.source] = describe(error)
        if not isinstance(error, EndsEngine):
            return
        self._found.num_ended += 1
        if self._ended_before + self._found.num_ended >= MAX_ENDED:
            for each in self._left[1:]:
                for group in each.partial:
                    failures.setdefault(group.prompt.source, ENDS_TOO_OFTEN)
            del self._left[1:]
