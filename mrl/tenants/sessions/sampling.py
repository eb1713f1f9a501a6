"""Draws the samples of a session from the service's engine, beside the requests of the tenants."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.collect.engine_slot import EngineSlot
from mrl.collect.single_turn import SingleTurnRollout, start_groups
from mrl.collect.sync import WeightSync
from mrl.config import Recipe, RolloutConfig
from mrl.errors import EngineGone, InputError, OutOfMemory, RankLost, RunFailed, WrongWeights
from mrl.exchange.sharing import share_bytes, sum_over_ranks
from mrl.rollout.base import EndsEngine, EngineLost, RolloutEngine, SamplingParams
from mrl.rollout.engine_group import EngineGroup
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.system.memory_error import out_of_memory
from mrl.tenants.sessions.bodies import SampleBody
from mrl.types import Prompt, RoutingTrace, Sample, SampleGroup
from parallel.mesh import Mesh
from parallel.policy import Policy

MAX_ROUTE_BYTES = 256 << 20
"""Bytes of routes that are kept of a session's samples, on each rank; the oldest ones go first."""
CANARY_TOKENS = 16
MAX_ENDED = 3
"""How many operations of a session may each kill an engine before the session is paused."""
ENDS_TOO_OFTEN = (
    f"{MAX_ENDED} samples of this session have each killed the engine twice, once among others and "
    "once alone; no other is tried, and the session is paused: see the log of the engine, then "
    "resume it"
)
ENGINE_FAULTS = (EngineGone, EngineLost, RankLost, OutOfMemory, MemoryError, dist.DistError)
"""Errors that are not the fault of one operation."""


class Samples:
    """Keeps the routes of the newest samples, so that training can replay them by the sample's id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Sample] = OrderedDict()
        self._num_bytes = 0

    def keep(self, name: str, sample: Sample) -> None:
        """Keep a sample that has routes, and drop the oldest ones beyond the limit."""
        if sample.routing is None:
            return
        self._kept[name] = sample
        self._num_bytes += _route_bytes(sample)
        while self._num_bytes > MAX_ROUTE_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= _route_bytes(oldest)

    def routes_of(self, name: str, tokens: Tensor) -> RoutingTrace:
        """Return the routes of a sample. Raises InputError where they are not kept, or `tokens` i64[T]
        are others than the sample's."""
        if (sample := self._kept.get(name)) is None or sample.routing is None:
            raise InputError(
                f"the routes of sample {name[:80]!r} are not kept: it is none of the newest samples "
                "since the session was opened; sample again, or leave `sample` out"
            )
        if not torch.equal(sample.token_ids, tokens):
            raise InputError(
                f"the tokens are not those of sample {name}, its prompt and its answer; give the same "
                "ones, or leave `sample` out"
            )
        return sample.routing


class SessionSampler:
    """Generates what the sample operations of one turn ask for, on one rank of the trainer.

    Every method is a collective, but for `generate`, which runs in a thread.
    """

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        place: tuple[EngineSlot, EngineGroup],
        vocab_size: int,
        *,
        keeps_routes: bool,
    ) -> None:
        """`place`: this rank's part of the engine, and the ranks that it spans."""
        self._recipe, self._mesh = recipe, mesh
        self.slot, group = place
        tp = recipe.rollout.tensor_parallel_size
        self._number, self._num_engines = mesh.rank // tp, mesh.dims.world // tp
        self._weights = WeightSync(
            recipe.rollout,
            recipe.model,
            _canaries(vocab_size, recipe.rollout),
            self.slot,
            group,
            sends_adapter=True,
        )
        self._keeps_routes = keeps_routes
        self.samples = Samples()
        self._asked: dict[str, SampleBody] = {}
        self._how: dict[int, tuple[SamplingParams, int]] = {}
        """The sampling parameters and seeds of a turn's groups, by group id."""
        self._left: list[SingleTurnRollout] = []
        """The rollouts that this rank's engine has still to generate, one after the other: all
        operations at once, or one by one if that failed."""
        self._done: list[SampleGroup] = []
        self._failures: dict[str, str] = {}
        """The errors on this rank, by operation."""
        self._num_ended = 0
        """The number of operations that have killed an engine since the session was opened."""
        self._sends = False
        self._is_generated = True

    @property
    def is_over(self) -> bool:
        """Whether nothing is asked for that is not answered."""
        return not self._asked

    @property
    def asked(self) -> list[str]:
        """The ids of the operations that are not answered."""
        return list(self._asked)

    @property
    def num_remaining(self) -> int:
        """Return 1 while this rank's engine has something left to generate."""
        return int(bool(self._left))

    def begin(self, asked: Mapping[str, tuple[SampleBody, int]]) -> None:
        """Begin the sample operations of a turn, by their ids, each with its seed."""
        self._asked = {name: body for name, (body, _) in asked.items()}
        self._done, self._failures, self._left = [], {}, []
        self._is_generated = not asked
        groups: list[SampleGroup] = []
        how: list[tuple[SamplingParams, int]] = []
        for name, (body, seed) in asked.items():
            prompts = [_prompt(name, i, tokens) for i, tokens in enumerate(body.prompts)]
            groups += start_groups(prompts, body.n, len(groups))
            how += [(body.sampling(self._recipe.rollout.temperature), seed)] * len(prompts)
        self._how = dict(enumerate(how))
        share = groups[self._number :: self._num_engines]
        if self.slot.engine is not None and share:
            self._left = [self._rollout(share)]
        self.slot.is_needed = bool(self.num_remaining)

    def _rollout(self, groups: Sequence[SampleGroup]) -> SingleTurnRollout:
        how = [self._how[group.samples[0].group_id] for group in groups]
        return SingleTurnRollout(groups, [one for one, _ in how], [seed for _, seed in how])

    def prepare_sync(self, policy: Policy, version: int) -> None:
        """Find out whether an engine lacks this version, and what it must answer to canaries."""
        engine = self.slot.engine
        lacks = engine is not None and self.slot.is_active and engine.weight_version != version
        self._sends = bool(sum_over_ranks(lacks))
        if self._sends:
            self._weights.expect_canaries(policy)

    def send(self, policy: Policy, version: int) -> None:
        """Send the adapter, where an engine lacks it."""
        if self._sends:
            with self._weights.export(policy, version) as buckets:
                self._weights.update(buckets, version)
            self._weights.raise_failures()

    def check_sync(self) -> None:
        """Compare the engine's canaries. Raises RunFailed."""
        if self._sends:
            self._weights.check_canaries()

    def generate(self) -> None:
        """Generate the remaining rollouts, until the engine is lost. An error of one operation fails
        only that operation: see `finish`. Raises errors of the engine, and WrongWeights."""
        engine = self.slot.engine
        if engine is None or not self.slot.is_active:
            return
        with self.slot.noting_loss():
            while self._left:
                self._generate(engine, self._left[0])
        if (
            self._left
        ):  # the engine was lost: try each operation alone, as one of them may be the cause
            self._left = [each for rollout in self._left for each in self._one_by_one(rollout)]

    def _generate(self, engine: RolloutEngine, rollout: SingleTurnRollout) -> None:
        """Generate the rest of a rollout, and remove it from the list. If it fails, it is replaced by
        one rollout for each of its operations; the error of a single operation is recorded."""
        parts: list[SingleTurnRollout] = []
        try:
            for group in rollout.finished(engine):
                self._done.append(group)
        except (*ENGINE_FAULTS, WrongWeights):
            raise
        except (ValueError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            parts = self._one_by_one(rollout)
            if len(parts) == 1:
                self._fail(parts.pop(), error)
        self._left[:1] = parts

    def _one_by_one(self, rollout: SingleTurnRollout) -> list[SingleTurnRollout]:
        """Return one rollout for each operation that is unfinished in `rollout`."""
        parts: dict[str, list[SampleGroup]] = {}
        for group in rollout.partial:
            parts.setdefault(group.prompt.source, []).append(group)
        return [self._rollout(groups) for groups in parts.values()]

    def _fail(self, rollout: SingleTurnRollout, error: Exception) -> None:
        """Record the error of an operation. After MAX_ENDED that killed an engine no other is tried."""
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
        """Find out whether all is generated; `was_lost`: whether any engine was."""
        self.slot.is_needed = bool(self.num_remaining)
        self._is_generated = not (was_lost and sum_over_ranks(self.slot.is_needed))

    def finish(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]] | None:
        """Return the results of the operations by their ids, and the errors of the others, on every
        rank; None while a lost engine has left rollouts to generate."""
        if not self._is_generated:
            return None
        failures: dict[str, str] = {}
        for said in share_bytes(json.dumps(self._failures).encode()):
            failures = json.loads(said) | failures
        asked, self._asked, self._left = self._asked, {}, []
        groups = [each for each in self._done if each.prompt.source not in failures]
        if self._mesh.dims.world > 1:
            mine = encode_groups(groups, with_routes=self._keeps_routes) if groups else b""
            parts = [decode_groups(part) for part in share_bytes(mine) if part]
            groups = [group for part in parts for group in part]
        groups = sorted(groups, key=lambda group: group.samples[0].group_id)
        results: dict[str, list[Any]] = {name: [] for name in asked if name not in failures}
        for group in groups:
            name, number = group.prompt.source, len(results[group.prompt.source])
            results[name].append([])
            for k, sample in enumerate(group.samples):
                own = f"{name}/{number}/{k}"
                if self._keeps_routes:
                    self.samples.keep(own, sample)
                results[name][-1].append(_shown(own, sample))
        return {name: {"samples": found} for name, found in results.items()}, failures

    def check_behaviour(self) -> None:
        """Raise RunFailed if samples of this session have killed the engine too often. For the rank
        that leads the engine."""
        if self._num_ended >= MAX_ENDED:
            raise RunFailed(ENDS_TOO_OFTEN)

    def close(self) -> None:
        """Let the engine forget this session."""
        self.slot.stop()


def _prompt(name: str, number: int, tokens: Sequence[int]) -> Prompt:
    return Prompt(str(number), torch.tensor(tokens), "", {}, source=name)


def _canaries(vocab_size: int, config: RolloutConfig) -> list[Prompt]:
    """Return the canary prompts, the same in every session with this model and context."""
    draw, size = (
        random.Random("canaries of a session"),
        min(CANARY_TOKENS, config.context_len or CANARY_TOKENS),
    )
    count = config.canary_prompts
    lists = [[draw.randrange(vocab_size) for _ in range(size)] for _ in range(count)]
    return [_prompt("canary", number, tokens) for number, tokens in enumerate(lists)]


def _shown(name: str, sample: Sample) -> dict[str, Any]:
    """Return an answer as the client gets it."""
    return {
        "id": name,
        "tokens": sample.response_ids.tolist(),
        "logprobs": sample.rollout_logprobs[sample.prompt_len :].tolist(),
        "version": sample.weight_versions[-1].version,
        "stop_reason": sample.finish_reason,
    }


def _route_bytes(sample: Sample) -> int:
    trace = sample.routing
    if trace is None:
        return 0
    weights = 0 if trace.expert_weights is None else trace.expert_weights.nbytes
    return trace.expert_ids.nbytes + weights
