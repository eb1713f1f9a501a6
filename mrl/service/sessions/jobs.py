"""What a worker of a rollout rank does for a session. This module imports no Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mrl.engine_pool.remote.messages import Delivered, Work
from mrl.engines.base import PolicyEndpoint
from mrl.service.sessions.engine_samples import Drawing, EngineSamples
from mrl.types import SampleGroup


@dataclass(frozen=True)
class _SamplesJob:
    """One engine's part of a turn. It implements `mrl.engine_pool.remote.jobs.Job`."""

    samples: EngineSamples
    keeps_routes: bool

    @property
    def is_over(self) -> bool:
        return self.samples.is_over

    def run(self, endpoint: PolicyEndpoint) -> None:
        self.samples.run(endpoint)

    def finish(self) -> Delivered:
        found = self.samples.finish()
        groups = found.groups if self.keeps_routes else [_without_routes(g) for g in found.groups]
        return Delivered(groups, notes=found.notes())


@dataclass(frozen=True)
class SessionJobs:
    """The jobs of a session. It implements `mrl.engine_pool.remote.jobs.Jobs`."""

    keeps_routes: bool
    """Whether the trainer gets the routes of samples."""

    def of(self, work: Work) -> Sequence[_SamplesJob]:
        how = {name: Drawing.of_json(each) for name, each in work.details["how"].items()}
        groups = [each.group for each in work.started]
        samples = EngineSamples(groups, how, int(work.details["num_ended"]))
        return [_SamplesJob(samples, self.keeps_routes)]

    def close(self) -> None:
        """Do nothing: a session has no processes on rollout ranks."""


def _without_routes(group: SampleGroup) -> SampleGroup:
    samples = [replace(sample, routing=None) for sample in group.samples]
    return replace(group, samples=samples)
