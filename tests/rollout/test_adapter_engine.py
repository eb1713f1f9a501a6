"""Adapters in a real SGLang, against transformers with the adapter merged into its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adapter_helpers import ATTENTION, KINDS, matrices_of, merged_oracle
from rollout_helpers import make_engine, make_prompts, make_requests, score, slow_steps
from torch import Tensor

from mrl.config.adapter import lora_name
from mrl.engines.base import Completion, Request, SamplingParams
from mrl.engines.sglang.adapter.digests import ACTION
from mrl.engines.sglang.engine import Engine
from mrl.types import WeightBucket

pytestmark = pytest.mark.release
TOLERANCE = 1e-4
LONG = 300


def buckets_of(matrices: dict[str, Tensor], version: int) -> Iterator[WeightBucket]:
    names = sorted(matrices)
    for start in range(0, len(names), 40):
        part = [(name, matrices[name]) for name in names[start : start + 40]]
        yield WeightBucket(part, version, is_last=start + 40 >= len(names))


class Served:
    """An engine of one kind of adapter, and the models of its first two versions."""

    def __init__(self, folder, kind: str, tmp, **config: object) -> None:
        self.adapter = KINDS[kind]
        self.matrices = [matrices_of(folder, self.adapter, seed) for seed in (0, 1, 2)]
        self.oracles = [
            merged_oracle(folder, self.adapter, self.matrices[version], tmp / f"{kind}{version}")
            for version in (1, 2)
        ]
        self.engine = make_engine(folder, tmp / f"{kind}.log", self.adapter, **config)

    def push(self, number: int, version: int):
        return self.engine.endpoint.update_weights(
            buckets_of(self.matrices[number], version), version
        )

    def loaded(self) -> list[str]:
        return sorted(self.engine.endpoint.updater._loaded.values())  # pyright: ignore


@pytest.fixture(scope="module", params=list(KINDS))
def served(request, toy_folder, tmp_path_factory) -> Iterator[Served]:
    served = Served(toy_folder, request.param, tmp_path_factory.mktemp("adapter"))
    served.engine.start()
    yield served
    served.engine.stop()


@pytest.fixture(scope="module")
def attention(toy_folder, tmp_path_factory) -> Iterator[Served]:
    served = Served(toy_folder, "attention", tmp_path_factory.mktemp("adapter"))
    served.engine.start()
    yield served
    served.engine.stop()


def check(oracle, request: Request, completion: Completion) -> float:
    """Log-probs against those of transformers, and the routes; returns the largest difference."""
    ids = torch.cat([request.token_ids, completion.output_ids])
    logprobs, routes = score(oracle, ids, len(request.token_ids), 1.0)
    assert completion.routing is not None
    got = completion.routing.expert_ids.long()
    assert torch.equal(got.sort(-1).values, routes.sort(-1).values)
    return float((completion.logprobs - logprobs).abs().max())


def worst_of(oracle, engine: Engine, requests: list[Request], **options: bool) -> float:
    """The largest difference over what these requests bring."""
    done = {c.request_id: c for c in engine.endpoint.generate(requests, **options)}
    return max(check(oracle, request, done[request.request_id]) for request in requests)


def raw_logprobs(engine: Engine, ids: Tensor, adapters: list[str | None]) -> list[list[float]]:
    """One batch in which each request asks for its own adapter, or for the base."""
    body: dict[str, Any] = {
        "input_ids": [ids.tolist()] * len(adapters),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "lora_path": adapters,
    }
    answers = engine.connection.post("/generate", body)
    return [[e[0] for e in a["meta_info"]["input_token_logprobs"][1:]] for a in answers]


def test_an_adapter_is_the_merged_model(served: Served, oracle):
    engine, sampling = served.engine, SamplingParams(16, 16)
    requests = make_requests(6, sampling, seed=1)
    assert worst_of(oracle, engine, requests) < TOLERANCE  # the base, before the first update
    for version, merged in enumerate(served.oracles, start=1):
        report = served.push(version, version)
        assert report.num_bytes == sum(m.nbytes for m in served.matrices[version].values())
        done = {c.request_id: c for c in engine.endpoint.generate(requests)}
        worst = max(check(merged, r, done[r.request_id]) for r in requests)
        assert worst < TOLERANCE
        assert {s.version for c in done.values() for s in c.weight_versions} == {version}
        traces = [c.routing for c in done.values()]
        assert {s.version for t in traces if t for s in t.row_versions} == {version}
        sequences = [prompt.token_ids for prompt in make_prompts(16, seed=7, num_tokens=40)]
        for sequence, got in zip(
            sequences, engine.endpoint.sequence_logprobs(sequences), strict=True
        ):
            expected, _ = score(merged, sequence, 1, 1.0)
            assert (got[1:] - expected).abs().max() < TOLERANCE
            base, _ = score(oracle, sequence, 1, 1.0)
            assert (got[1:] - base).abs().max() > 0.01  # an adapter that does nothing would pass
    assert served.loaded() == ["mrl@2"]


def test_base_and_adapter_in_one_batch(served: Served, oracle):
    served.push(1, 11)
    ids = make_requests(1, SamplingParams(1), seed=3)[0].token_ids
    base, adapted, again = raw_logprobs(served.engine, ids, [None, "mrl@11", None])
    expected = [score(model, ids, 1, 1.0)[0] for model in (oracle, served.oracles[0])]
    for got, wanted in ((base, expected[0]), (adapted, expected[1]), (again, expected[0])):
        assert (torch.tensor(got) - wanted).abs().max() < TOLERANCE


def test_sleep_keeps_the_base(served: Served):
    served.push(1, 21)
    with pytest.raises(RuntimeError, match=r"sleep\(2\): updates bring an adapter"):
        served.engine.sleep()
    served.engine.sleep(1)
    assert served.engine.endpoint.weight_version == 21
    served.engine.wake()
    requests = make_requests(2, SamplingParams(8, 8), seed=4)
    assert worst_of(served.oracles[0], served.engine, requests) < TOLERANCE


def planted(matrices: dict[str, Tensor], other: dict[str, Tensor], fault: str):
    """(what is pushed, what the error names)."""
    first, second = (lora_name("model.layers.1.self_attn.o_proj.weight", m) for m in ("A", "B"))
    spoiled = dict(matrices)
    if fault == "A and B swapped":
        spoiled[first], spoiled[second] = matrices[second], matrices[first]
        return spoiled, first
    if fault == "A missing":
        del spoiled[first]
        return spoiled, f"expected 1 more: {first}"
    return spoiled | {first: other[first]}, first


def spoil(engine: Engine, monkeypatch, matrices: dict[str, Tensor], alpha_factor: float) -> None:
    """Let these come to SGLang in the place of what is sent, after the trainer's digests."""
    sync: Any = engine.endpoint.updater
    post, take = engine.connection.post, sync._take

    def tampered(path, body, **options):
        if path == "/load_lora_adapter_from_tensors":
            body["config_dict"]["lora_alpha"] *= alpha_factor
        return post(path, body, **options)

    def taken(buckets, version, clock):
        laid_out, came, seconds = take(buckets, version, clock)
        for name, matrix in matrices.items():
            laid_out.views[name].copy_(matrix)
        return laid_out, came, seconds

    monkeypatch.setattr(engine.connection, "post", tampered)
    monkeypatch.setattr(sync, "_take", taken)


@pytest.mark.parametrize(
    "fault", ["A and B swapped", "A missing", "a stale matrix", "another tenant's", "wrong alpha"]
)
def test_planted_faults(attention: Served, monkeypatch, fault):
    """The update fails on the way to the engine or in it, and nothing is generated."""
    engine = attention.engine
    attention.push(1, 31)
    matrices, name = planted(attention.matrices[2], attention.matrices[1], fault)
    message = name
    if fault in ("a stale matrix", "another tenant's", "wrong alpha"):
        spoiled, matrices = matrices, attention.matrices[2]
        if fault == "another tenant's":
            spoiled = attention.matrices[0]
            message = r"layers\.0\.self_attn\.k_proj\.lora_A\.weight: sent \w{16}"
        if fault == "wrong alpha":
            spoiled, message = {}, "the scale alpha / rank: sent 2, the engine holds 4"
        spoil(engine, monkeypatch, spoiled, alpha_factor=2.0 if fault == "wrong alpha" else 1.0)
    with pytest.raises((RuntimeError, ValueError), match=message):
        engine.endpoint.update_weights(buckets_of(matrices, 32), 32)
    assert engine.endpoint.weight_version is None
    with pytest.raises(RuntimeError, match="no weights"):
        next(engine.endpoint.generate(make_requests(1, SamplingParams(1))))
    monkeypatch.undo()
    attention.push(2, 32)
    assert engine.endpoint.weight_version == 32
    assert attention.loaded() == ["mrl@32"]


@pytest.mark.parametrize("served", ["per_expert"], indirect=True)
@pytest.mark.parametrize("is_sent", [False, True])
def test_the_a_of_one_expert_is_missing(served: Served, monkeypatch, is_sent: bool):
    """It is not sent, or it is lost on the way to SGLang."""
    name = lora_name("model.layers.2.mlp.experts.5.up_proj.weight", "A")
    matrices, message = dict(served.matrices[1]), f"expected 1 more: {name}"
    if is_sent:
        spoil(served.engine, monkeypatch, {name: torch.zeros_like(matrices[name])}, 1.0)
        message = rf"{name}: sent \w{{16}}, the engine holds 0{{16}}"
    else:
        del matrices[name]
    with pytest.raises((RuntimeError, ValueError), match=message):
        served.engine.endpoint.update_weights(buckets_of(matrices, 61), 61)
    assert served.engine.endpoint.weight_version is None


def test_a_newer_version_beside_a_request_in_flight(attention: Served):
    """Nothing is paused: what began under the first version ends under it."""
    engine = attention.engine
    attention.push(1, 41)
    short = make_requests(1, SamplingParams(8, 8), seed=1)
    long = make_requests(3, SamplingParams(LONG, LONG), seed=2)
    running = engine.endpoint.generate([*short, *long], concurrent=True)
    with slow_steps():
        assert next(running).request_id == "1-0"
        attention.push(2, 42)
        assert attention.loaded() == ["mrl@41", "mrl@42"]
        assert engine.endpoint.in_flight.any_open
        new = make_requests(
            2, SamplingParams(8, 8), seed=1
        )  # the same prompt: another's prefix is cached
        requests = [Request(f"new-{r.request_id}", r.token_ids, r.seed, r.sampling) for r in new]
        for completion in engine.endpoint.generate(requests, concurrent=True):
            request = next(r for r in requests if r.request_id == completion.request_id)
            assert check(attention.oracles[1], request, completion) < TOLERANCE
            assert [s.version for s in completion.weight_versions] == [42]
            assert completion.routing is not None
            assert completion.routing.num_cached_rows == 0
        assert engine.endpoint.in_flight.any_open  # the long ones have not ended yet
    done = {c.request_id: c for c in running}
    for request in long:
        completion = done[request.request_id]
        assert len(completion.output_ids) == LONG
        assert [s.version for s in completion.weight_versions] == [41]
        assert check(attention.oracles[0], request, completion) < TOLERANCE
    assert attention.loaded() == ["mrl@42"]
    with pytest.raises(RuntimeError):
        raw_logprobs(engine, long[0].token_ids, ["mrl@41"])


def test_requests_that_were_aborted_hold_no_adapter(attention: Served):
    """More than the cache has room for: SGLang forgets to release those that had not begun."""
    engine = attention.engine
    attention.push(1, 51)
    many = make_requests(40, SamplingParams(LONG, LONG), seed=3)
    running = engine.endpoint.generate([*make_requests(1, SamplingParams(8, 8), seed=1), *many])
    with slow_steps():
        next(running)
        engine.endpoint.abort()
    lengths = [len(c.output_ids) for c in running]
    assert min(lengths) == 0 < max(lengths)
    attention.push(2, 52)
    assert attention.loaded() == ["mrl@52"]


def test_an_engine_of_two_ranks(toy_folder, tmp_path):
    served = Served(toy_folder, "shared_outer", tmp_path, tensor_parallel_size=2)
    served.engine.start()
    try:
        served.push(1, 1)
        answer = served.engine.connection.post("/weights_checker", {"action": ACTION + "mrl@1"})
        ranks = [rank["checksums"] for rank in answer["ranks"]]
        assert len(ranks) == 2
        assert ranks[0] == ranks[1]
        assert not ranks[0]["slot"]
        requests = make_requests(3, SamplingParams(8, 8), seed=1)
        assert worst_of(served.oracles[0], served.engine, requests) < TOLERANCE
    finally:
        served.engine.stop()


def test_a_part_of_the_attention(toy_folder, tmp_path, monkeypatch):
    """SGLang takes query, key and value together only."""
    adapter = KINDS["attention"].__class__(2, 2.0, ("v_proj",))
    monkeypatch.setitem(KINDS, "values", adapter)
    assert "q_proj" in ATTENTION
    served = Served(toy_folder, "values", tmp_path)
    served.engine.start()
    try:
        served.push(1, 1)
        requests = make_requests(3, SamplingParams(8, 8), seed=1)
        assert worst_of(served.oracles[0], served.engine, requests) < TOLERANCE
    finally:
        served.engine.stop()
