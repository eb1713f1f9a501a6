"""Samples a session on an engine on the trainer's devices, in the rollout phases of a colocated
service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from mrl.engine_pool.part import EnginePart
from mrl.errors import InputError
from mrl.exchange.sharing import sum_over_ranks
from mrl.service.sessions.engine_samples import Drawing, EngineSamples, Generated
from mrl.service.sessions.samplers import Source
from mrl.types import SampleGroup
from parallel.policy import Policy


class LocalSampling:
    """This rank's engine. It implements `SessionEngines`; every method is a collective except
    `generate`, which runs in a thread."""

    def __init__(
        self,
        part: EnginePart,
        policy: Policy,
        in_place: Callable[[Source], AbstractContextManager[None]],
        number: int,
        num_engines: int,
    ) -> None:
        """`part`: the object through which the session uses this rank's engine. `in_place` is
        `Samplers.in_place`. `number`: that of this rank's engine, of `num_engines`."""
        self.part, self._policy, self._in_place = part, policy, in_place
        self._number, self._num_engines = number, num_engines
        self._source, self._sends = Source(None, 0, 0), False
        self._asked: list[str] = []
        self._failures: dict[str, str] = {}
        """The errors of all operations of the turn, if their weights cannot be read."""
        self._samples: EngineSamples | None = None
        """This engine's part of the turn; None if it has none."""
        self._num_ended = 0
        self._is_generated = True

    @property
    def has_samples(self) -> bool:
        """Whether `finish` has returned the results of the turn."""
        return not self._asked

    @property
    def num_remaining(self) -> int:
        """1 if this rank's engine still has rollouts to generate or prompts to score, otherwise 0."""
        return int(self._samples is not None and not self._samples.is_over)

    def begin(
        self, groups: Sequence[SampleGroup], how: Mapping[str, Drawing], source: Source
    ) -> None:
        self._asked, self._source, self._failures = list(how), source, {}
        self._is_generated = not how
        share = groups[self._number :: self._num_engines]
        has_part = self.part.endpoint is not None and share
        self._samples = EngineSamples(share, how, self._num_ended) if has_part else None
        self.part.is_needed = bool(self.num_remaining)

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
            self._samples, self._sends = None, False

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
        """Generate the remaining rollouts; stop early if the engine is lost. Raises errors that end
        the service, and WrongWeights."""
        endpoint = self.part.active_endpoint
        if endpoint is not None and self._samples is not None:
            with self.part.engine.noting_loss():
                self._samples.run(endpoint)

    def end_generation(self, *, was_lost: bool) -> None:
        """Determine whether all ranks have generated everything; `finish` uses the result.
        `was_lost`: whether any engine was lost."""
        self.part.is_needed = bool(self.num_remaining)
        self._is_generated = not (was_lost and sum_over_ranks(self.part.is_needed))

    def finish(self) -> Generated | None:
        if not self._is_generated:
            return None
        found = Generated() if self._samples is None else self._samples.finish()
        self._samples, self._asked = None, []
        self._num_ended += found.num_ended
        return Generated(
            found.groups, found.failures | self._failures, found.scores, found.num_ended
        )

    def close(self) -> None:
        self.part.release()
