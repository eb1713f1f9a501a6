"""The SGLang engine with a fault that can be switched on: `rollout.engine=benchmarks.planted_engine`.

What mrl proves of a sync is kept from seeing it: the digests are made to match the wrong weights, as
those of an exporter that reads the wrong memory would. Canaries would still see a stale expert; the
planted runs turn them off.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mrl.engines.base import Completion, EngineConfig, Request, SyncReport
from mrl.engines.sglang.server import SGLangServer
from mrl.kernels.digest import add_digests, digests_of
from mrl.types import WeightBucket


@dataclass(frozen=True)
class StaleExpert:
    """One expert (None: the whole model) keeps the weights of `version`."""

    layer: int
    """1-based."""
    expert: int | None
    version: int

    def affects(self, name: str) -> bool:
        """Tell whether a weight is affected; `name` is Hugging Face's, where layers begin at 0."""
        place = f"model.layers.{self.layer - 1}.mlp.experts.{self.expert}."
        return self.expert is None or name.startswith(place)


@dataclass(frozen=True)
class PerturbedExpert:
    """One expert is off by a random change of `size` times the norm of each of its matrices."""

    layer: int
    expert: int
    size: float

    def affects(self, name: str) -> bool:
        """Tell whether the weight is one of the perturbed expert; see StaleExpert.affects."""
        return StaleExpert(self.layer, self.expert, 0).affects(name)


@dataclass(frozen=True)
class ShiftedRoutes:
    """Row t of what the engine returns is that of token t - shift."""

    shift: int


@dataclass(frozen=True)
class OtherTemperature:
    """The engine samples at this temperature and does not report it."""

    temperature: float


@dataclass(frozen=True)
class WrongAdapter:
    """The engine gets another adapter than the trainer's, with the same names and shapes."""

    kind: Literal["A and B swapped", "wrong alpha", "another tenant's", "A missing"]
    """`A and B swapped` are those of the output projections, transposed; the alpha is twice the right
    one; `A missing` are those of one expert."""
    layer: int = 1
    """1-based."""
    expert: int = 0

    def affects(self, name: str) -> bool:
        """Tell whether a matrix is affected; `name` is PEFT's."""
        return {
            "A and B swapped": ".o_proj." in name,
            "wrong alpha": ".lora_B." in name,
            "another tenant's": True,
            "A missing": ".lora_A." in name
            and f".{self.layer - 1}.mlp.experts.{self.expert}." in name,
        }[self.kind]

    def wrong(self, name: str, sent: Mapping[str, Tensor]) -> Tensor:
        """Return what comes in the place of matrix `name` of those that were sent."""
        if self.kind == "A and B swapped":
            swapped = {"A": "B", "B": "A"}
            return sent[re.sub(r"lora_([AB])", lambda m: f"lora_{swapped[m[1]]}", name)].T
        if self.kind == "wrong alpha":
            return 2 * sent[name]
        if self.kind == "A missing":
            return torch.zeros_like(sent[name])
        noise = torch.randn(
            sent[name].shape, generator=torch.Generator().manual_seed(sum(name.encode()))
        )
        return noise * float(sent[name].std())


Fault = StaleExpert | PerturbedExpert | ShiftedRoutes | OtherTemperature | WrongAdapter


class Engine:
    """A healthy engine, and an endpoint of it that has the `fault`, which may be set between two steps.
    It is its own endpoint; all that is not defined here is the healthy engine's."""

    def __init__(self, config: EngineConfig) -> None:
        self._server = SGLangServer(config)
        self.endpoint, self._healthy = self, self._server.endpoint
        self.fault: Fault | None = None
        self._history: dict[int, dict[str, Tensor]] = {}
        """Every weight that was sent, by version. A toy model is small."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server if hasattr(self._server, name) else self._healthy, name)

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        return self._healthy.update_weights(self._spoiled(buckets, version), version)

    def _spoiled(self, buckets: Iterable[WeightBucket], version: int) -> Iterator[WeightBucket]:
        seen = self._history[version] = {}
        for bucket in buckets:
            seen |= {name: tensor.clone() for name, tensor in bucket.tensors}
            fault = self.fault
            if not isinstance(fault, StaleExpert | PerturbedExpert | WrongAdapter):
                yield bucket
                continue
            for name, tensor in bucket.tensors:
                if fault.affects(name):
                    tensor.copy_(self._wrong(fault, name, tensor, seen))
            yield dataclasses.replace(bucket, digest=add_digests(digests_of(bucket.tensors)))

    def _wrong(
        self, fault: StaleExpert | PerturbedExpert | WrongAdapter, name: str, tensor: Tensor,
        seen: dict[str, Tensor],
    ) -> Tensor:  # fmt: skip
        if isinstance(fault, WrongAdapter):
            return fault.wrong(name, seen)
        if isinstance(fault, StaleExpert):
            return self._history[fault.version][name]
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        return tensor + fault.size * float(tensor.norm() / noise.norm()) * noise

    def generate(self, requests: Sequence[Request], **options: Any) -> Iterator[Completion]:
        fault = self.fault
        if isinstance(fault, OtherTemperature):
            requests = [
                dataclasses.replace(
                    r, sampling=dataclasses.replace(r.sampling, temperature=fault.temperature)
                )
                for r in requests
            ]
        for completion in self._healthy.generate(requests, **options):
            yield _shifted(completion, fault) if isinstance(fault, ShiftedRoutes) else completion


def _shifted(completion: Completion, fault: ShiftedRoutes) -> Completion:
    trace = completion.routing
    if trace is None:
        return completion
    moved = trace.expert_ids.roll(fault.shift, 0)
    return dataclasses.replace(completion, routing=dataclasses.replace(trace, expert_ids=moved))
