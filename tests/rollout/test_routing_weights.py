"""`rollout.return_routing_weights`: the gates' weights that the engine used, beside the expert ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rollout_helpers import load_oracle, make_engine, make_requests
from torch import Tensor

from moe.trace import decode_routes, join_traces
from mrl.engines.base import Completion, SamplingParams
from mrl.engines.sglang.decode import refuse_weights, without_last_token
from mrl.errors import InputError
from mrl.types import RoutingTrace, VersionSpan

ROWS, LAYERS, TOPK = 3, 2, 2


def decode(ids: Tensor, weights: Tensor, **changes: object) -> RoutingTrace:
    """Decode them from what the plugin sends: int32 [T-1, H, 2K]."""
    wire = torch.cat([ids.int(), weights.float().contiguous().view(torch.int32)], dim=-1)
    settings = {
        "num_tokens": ROWS + 1,
        "num_hidden_layers": LAYERS,
        "moe_layer_numbers": [1, 2],
        "num_experts": 4,
        "topk": TOPK,
        "row_versions": (VersionSpan(0, 0, ROWS),),
        "num_cached_rows": 0,
        "with_weights": True,
        **changes,
    }
    return decode_routes(wire.numpy().ravel(), **settings)  # type: ignore[arg-type]


@pytest.fixture
def ids() -> Tensor:
    return torch.tensor([[[0, 1], [3, 2]], [[1, 2], [2, 0]], [[3, 0], [0, 3]]])


@pytest.fixture
def weights() -> Tensor:
    return torch.rand(ROWS, LAYERS, TOPK, generator=torch.Generator().manual_seed(0))


def test_bits_and_order_are_kept(ids: Tensor, weights: Tensor) -> None:
    trace = decode(ids, weights)
    assert trace.expert_weights is not None
    assert torch.equal(trace.expert_ids.long(), ids)
    assert torch.equal(trace.expert_weights, weights)
    dense = decode(ids, weights, moe_layer_numbers=[2])
    assert dense.expert_weights is not None
    assert torch.equal(dense.expert_weights, weights[:, 1:])


def test_what_is_no_weight_is_refused(ids: Tensor, weights: Tensor) -> None:
    weights[1, 1, 0] = -0.5
    with pytest.raises(ValueError, match=r"token 1 in MoE layer 2 has weights \[-0.5"):
        decode(ids, weights)
    weights[1, 1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"token 1 in MoE layer 2 has weights \[nan"):
        decode(ids, weights)
    with pytest.raises(ValueError, match=r"got 24 numbers \(6 rows\), expected 12"):
        decode(ids, weights, with_weights=False)


def test_pieces_keep_theirs(ids: Tensor, weights: Tensor) -> None:
    whole = decode(ids, weights)
    completion = Completion(
        request_id="x",
        output_ids=torch.arange(2),
        logprobs=torch.zeros(2),
        finish_reason="abort",
        weight_versions=(VersionSpan(0, 2, 4),),
        routing=whole,
    )
    cut = without_last_token(completion).routing
    assert cut is not None
    assert cut.expert_weights is not None
    assert torch.equal(cut.expert_weights, weights[:-1])
    joined = join_traces(cut, decode(ids, weights + 1))
    assert joined.expert_weights is not None
    assert torch.equal(joined.expert_weights, torch.cat([weights[:-1], weights[-1:] + 1]))


def test_refused_where_there_are_none() -> None:
    with pytest.raises(InputError, match=r"is on with no routes; expected moe\.routing_replay=r3"):
        refuse_weights(on_gpu=False, return_routes=False)
    with pytest.raises(InputError, match="is on with an engine on GPUs"):
        refuse_weights(on_gpu=True, return_routes=True)


def test_a_real_server_returns_the_routers_softmax(toy_folder: Path, tmp_path: Path) -> None:
    """Prompts and generated tokens, several in a batch, against transformers' router logits."""
    engine = make_engine(toy_folder, tmp_path / "engine.log", return_routing_weights=True)
    engine.start()
    try:
        requests = make_requests(5, SamplingParams(12, 12))
        done = {c.request_id: c for c in engine.endpoint.generate(requests)}
    finally:
        engine.stop()
    oracle = load_oracle(toy_folder)
    for request in requests:
        completion = done[request.request_id]
        trace = completion.routing
        assert trace is not None
        assert trace.expert_weights is not None
        tokens = torch.cat([request.token_ids, completion.output_ids])
        with torch.no_grad():
            logits = oracle(tokens[None], output_router_logits=True).router_logits
        shares = torch.stack([layer.softmax(-1)[:-1] for layer in logits], 1)
        chosen = shares.gather(-1, trace.expert_ids.long())
        expected = chosen / chosen.sum(-1, keepdim=True)
        assert (trace.expert_weights - expected).abs().max() < 1e-5
        # In the order of the ids, which is that in which SGLang adds the experts.
        assert bool((trace.expert_weights[..., 0] >= trace.expert_weights[..., 1]).all())
        assert trace.expert_weights.unique().numel() > 100
