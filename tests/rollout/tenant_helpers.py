"""Tenants of the toy model that differ in rank, alpha, modules and kind of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from adapter_helpers import ATTENTION, EXPERT, matrices_of, merged_oracle
from rollout_helpers import SLOW, score
from slow_steps import server_args as slow_steps_args
from torch import Tensor

from mrl.config import ModelConfig, RolloutConfig
from mrl.config.adapter import Adapter, AdapterLimits
from mrl.engines.admission import AdmissionPolicy
from mrl.engines.base import Completion, EngineConfig, PolicyEndpoint, Request
from mrl.engines.gate import Gate
from mrl.engines.sglang.adapter.update import AdapterUpdater
from mrl.engines.sglang.endpoint import SGLangEndpoint
from mrl.engines.sglang.server import SGLangServer
from mrl.types import WeightBucket

TENANTS = {
    "ada": Adapter(4, 8.0, ATTENTION),
    "bob": Adapter(2, 2.0, ("q_proj", "v_proj"), "shared_outer", EXPERT),
    "cleo": Adapter(8, 4.0, ATTENTION, "per_expert", EXPERT),
    "dan": Adapter(3, 6.0, ("o_proj",)),
}
"""More of them than slots."""
LIMITS = AdapterLimits.around(list(TENANTS.values()), num_slots=3)


def buckets_of(matrices: Mapping[str, Tensor], version: int) -> Iterator[WeightBucket]:
    names = sorted(matrices)
    for start in range(0, len(names), 40):
        part = [(name, matrices[name]) for name in names[start : start + 40]]
        yield WeightBucket(part, version, is_last=start + 40 >= len(names))


def make_tenants(
    folder: Path,
    log_path: Path,
    limits: AdapterLimits = LIMITS,
    policy: AdmissionPolicy | None = None,
    **config: object,
) -> SGLangServer:
    settings = {
        "max_response_len": 32,
        "start_timeout_s": 240.0,
        "max_total_tokens": 4096,
        "server_args": slow_steps_args(SLOW),
        **config,
    }
    engine = EngineConfig(
        model=ModelConfig(path=str(folder), dtype="float32"),
        rollout=RolloutConfig.model_validate(settings),
        log_path=log_path,
    )
    return SGLangServer(engine, adapters=limits, gate=Gate(policy))


class Tenant:
    """An endpoint of the engine, with the adapters that it is sent and the models they should make."""

    def __init__(self, engine: SGLangServer, name: str, folder: Path, tmp: Path) -> None:
        self.adapter = TENANTS[name]
        self.name, self.endpoint = name, engine.add_endpoint(name, self.adapter)
        self._folder, self._tmp = folder, tmp
        self._oracles: dict[int, Any] = {}

    @staticmethod
    def matrices_of(folder: Path, name: str, number: int) -> dict[str, Tensor]:
        seed = 100 * (1 + list(TENANTS).index(name)) + number
        return matrices_of(folder, TENANTS[name], seed)

    def matrices(self, number: int) -> dict[str, Tensor]:
        return self.matrices_of(self._folder, self.name, number)

    def push(self, number: int, version: int | None = None):
        version = number if version is None else version
        return self.endpoint.update_weights(buckets_of(self.matrices(number), version), version)

    def oracle(self, number: int):
        if number not in self._oracles:
            into = self._tmp / f"{self.name}{number}"
            self._oracles[number] = merged_oracle(
                self._folder, self.adapter, self.matrices(number), into
            )
        return self._oracles[number]

    def worst(
        self, number: int, requests: Sequence[Request], completions: Sequence[Completion]
    ) -> float:
        """The largest difference of log-probs against transformers; the routes must be equal."""
        done = {completion.request_id: completion for completion in completions}
        assert done.keys() == {request.request_id for request in requests}
        found = []
        for request in requests:
            completion = done[request.request_id]
            ids = torch.cat([request.token_ids, completion.output_ids])
            logprobs, routes = score(self.oracle(number), ids, len(request.token_ids), 1.0)
            assert completion.routing is not None
            got = completion.routing.expert_ids.long()
            assert torch.equal(got.sort(-1).values, routes.sort(-1).values)
            found.append(float((completion.logprobs - logprobs).abs().max()))
        return max(found)


def loaded(endpoint: SGLangEndpoint) -> list[str]:
    assert isinstance(endpoint.updater, AdapterUpdater)
    return sorted(endpoint.updater._loaded.values())


def cached_rows(endpoint: PolicyEndpoint, requests: Sequence[Request]) -> list[int]:
    """What SGLang says it read from its prefix cache (`cached_tokens`), of each request."""
    done = {c.request_id: c for c in endpoint.generate(requests, concurrent=True)}
    traces = [done[request.request_id].routing for request in requests]
    assert all(trace is not None for trace in traces)
    return [trace.num_cached_rows for trace in traces if trace is not None]
