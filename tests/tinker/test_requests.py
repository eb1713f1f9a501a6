"""Requests of the API, and the operations that they become."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zstandard

from mrl.tinker.wire import bytes_field, int_field
from tests.tinker.conftest import Api
from tests.tinker.test_wire import datum, tensor


def request(model: str, number: int, loss: str = "cross_entropy", **inputs: Any) -> bytes:
    """A forward_backward with one datum of the tokens 5 6 7 and the targets 6 7 8."""
    inputs = {"target_tokens": tensor([6, 7, 8], "<i8", 2), **inputs}
    return b"".join(
        [
            bytes_field(1, model),
            int_field(2, number),
            bytes_field(3, datum([5, 6, 7], **inputs)),
            bytes_field(4, loss),
        ]
    )


PROTO = {"Content-Type": "application/x-protobuf"}


def test_a_pass_becomes_an_operation(api: Api) -> None:
    model = api.model()
    weights = tensor([0.0, 1.0, -0.5], "<f4", 1)
    posted = api.call("forward_backward", request(model, 1, weights=weights), **PROTO).json()
    assert posted == {"request_id": f"{model}:1", "model_id": model}
    (operation,) = api.taken(model)
    body = operation.body.model_dump()
    assert (body["kind"], body["loss"], body["all_logprobs"]) == (
        "forward_backward",
        "cross_entropy",
        True,
    )
    (sequence,) = body["sequences"]
    assert sequence["tokens"] == [5, 6, 7, 8]
    assert sequence["targets"] is None
    assert sequence["weights"] == [0.0, 0.0, 1.0, -0.5]
    result = {
        "loss": 1.5,
        "logprobs": [[0.0, -1.0, -2.0, -3.0]],
        "metrics": {"session/replayed_rows": 3, "ratio/mean": 1.0},
    }
    api.answer(model, operation, result)
    found = api.result(f"{model}:1")
    assert found["metrics"] == {
        "loss:sum": 1.5,
        "session/replayed_rows:sum": 3.0,
        "ratio/mean:mean": 1.0,
    }
    assert found["loss_fn_outputs"][0]["logprobs"]["data"] == [-1.0, -2.0, -3.0]


def json_pass(model: str, targets: list[float]) -> dict[str, Any]:
    return {
        "model_id": model,
        "seq_id": 1,
        "forward_backward_input": {
            "data": [
                {
                    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
                    "loss_fn_inputs": {
                        "target_tokens": {"data": targets, "dtype": "int64"},
                        "weights": {"data": [0, 1, 1], "dtype": "float32", "shape": [3]},
                    },
                }
            ],
            "loss_fn": "cross_entropy",
        },
    }


def test_targets_with_a_fraction_are_refused(api: Api) -> None:
    model = api.model()
    found = api.call("forward_backward", json_pass(model, [6, 7.7, 8]))
    assert found.status_code == 400
    assert "target_tokens is int64 and has a number with a fraction" in found.json()["detail"]
    assert not api.taken(model)


def test_compressed_and_json_forms_are_the_same_request(api: Api) -> None:
    model = api.model()
    weights = tensor([0.0, 1.0, 1.0], "<f4", 1)
    content = request(model, 1, weights=weights)
    small = zstandard.ZstdCompressor().compress(content)
    first = api.call("forward_backward", content, **PROTO)
    second = api.call("forward_backward", small, **PROTO, **{"Content-Encoding": "zstd"})
    third = api.call("forward_backward", json_pass(model, [6, 7, 8]))
    assert [each.status_code for each in (first, second, third)] == [200, 200, 200], third.text
    assert len(api.taken(model)) == 1


def test_a_bomb_is_not_unpacked(api: Api) -> None:
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (64 << 20))
    assert len(bomb) < 10_000
    found = api.call("forward_backward", bomb, **PROTO, **{"Content-Encoding": "zstd"})
    assert (found.status_code, "when it is decompressed" in found.text) == (413, True)
    for content in (bomb[:-5], b"no zstd"):
        found = api.call("forward_backward", content, **PROTO, **{"Content-Encoding": "zstd"})
        assert found.status_code in (400, 413)


def test_targets_that_are_not_the_next_tokens(api: Api) -> None:
    model = api.model()
    inputs = {
        "target_tokens": tensor([0, 0, 9], "<i8", 2),
        "logprobs": tensor([0, 0, -1.5], "<f4", 1),
        "advantages": tensor([0, 0, 2], "<f4", 1),
    }
    assert api.call("forward_backward", request(model, 1, "ppo", **inputs), **PROTO).is_success
    (operation,) = api.taken(model)
    body = operation.body.model_dump()
    (sequence,) = body["sequences"]
    assert (sequence["tokens"], sequence["targets"]) == ([5, 6, 7, 9], [5, 0, 0, 9])
    assert np.allclose([body["clip_low"], body["clip_high"]], 0.2)


LOSSES: list[tuple[str, dict[str, bytes], str]] = [
    ("ppo", {}, "ppo needs logprobs"),
    ("cross_entropy", {"advantages": tensor([1] * 3, "<f4", 1)}, "does not read advantages"),
    ("magic", {}, "expected one of cross_entropy"),
    ("custom", {}, "create_custom_loss is not uploaded"),
]


def test_losses_that_do_not_fit_are_refused(api: Api) -> None:
    model = api.model()
    for number, (loss, inputs, says) in enumerate(LOSSES, start=1):
        found = api.call("forward_backward", request(model, number, loss, **inputs), **PROTO)
        assert found.status_code == 400
        assert says in found.json()["detail"]
        assert not api.taken(model)


def test_thresholds_are_refused_by_their_names(api: Api) -> None:
    body = json_pass(api.model(), [6, 7, 8])
    asked = body["forward_backward_input"]
    numbers = {"data": [0, -1, -1], "dtype": "float32"}
    inputs = asked["data"][0]["loss_fn_inputs"]
    asked["data"][0]["loss_fn_inputs"] = {
        "target_tokens": inputs["target_tokens"], "logprobs": numbers, "advantages": numbers,
    }  # fmt: skip
    wrong = (
        ("clip_low_threshold", 1.0),
        ("clip_low_threshold", -0.1),
        ("clip_high_threshold", 1.0),
    )
    for number, (option, value) in enumerate(wrong, start=1):
        asked |= {"loss_fn": "ppo", "loss_fn_config": {option: value}}
        found = api.call("forward_backward", {**body, "seq_id": number})
        assert (found.status_code, f"{option} is {value:g}, expected" in found.text) == (400, True)


def test_numbers_of_requests_are_positive(api: Api) -> None:
    model = api.model()
    for number in (0, -1):
        content = request(model, number)
        assert api.call("forward_backward", content, **PROTO).status_code == 422


def test_forward_has_a_loss(api: Api) -> None:
    model = api.model()
    weights = tensor([0.0, 1.0, 0.5], "<f4", 1)
    content = request(model, 1, weights=weights) + int_field(6, 1)
    assert api.call("forward_backward", content, **PROTO).is_success
    (operation,) = api.taken(model)
    assert operation.body.kind == "forward"
    api.answer(model, operation, {"logprobs": [[0.0, -1.0, -2.0, -4.0]]})
    assert api.result(f"{model}:1")["metrics"] == {"loss:sum": 4.0}


def test_a_request_is_carried_out_once(api: Api) -> None:
    model = api.model()
    step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}}
    first, again = api.ask("optim_step", step), api.ask("optim_step", step)
    assert first == again
    (operation,) = api.taken(model)
    body = operation.body.model_dump()
    assert [body[k] for k in ("lr", "beta1", "beta2", "eps", "weight_decay", "clip_grad")] == [
        1e-3, 0.9, 0.95, 1e-12, 0.0, 0.0,
    ]  # fmt: skip
    status, says = api.refused("optim_step", {**step, "adam_params": {"learning_rate": 1e-4}})
    assert (status, "another body" in says) == (400, True)
    api.answer(model, operation, {"version": 1, "grad_norm": 0.5, "lr": 1e-3})
    assert api.result(f"{model}:1")["metrics"] == {
        "unclipped_grad_l2:mean": 0.5,
        "learning_rate:mean": 1e-3,
        "version:max": 1.0,
    }


def test_failures_have_the_form_of_the_sdk(api: Api) -> None:
    model = api.model()
    api.ask("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    (operation,) = api.taken(model)
    api.answer(model, operation, error="there are no gradients")
    assert api.result(f"{model}:1") == {"error": "there are no gradients", "category": "user"}
    assert api.refused("retrieve_future", {"request_id": "none"})[0] == 404


def test_what_is_not_done_is_asked_for_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.tinker.app.HOLD_S", 0.05)
    model = api.model()
    api.ask("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    found = api.call("retrieve_future", {"request_id": f"{model}:1"})
    assert found.status_code == 408
    assert found.json() == {
        "type": "try_again", "request_id": f"{model}:1", "queue_state": "active",
    }  # fmt: skip


def test_large_results_are_announced(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.tinker.app.INLINE_BYTES", 10)
    model = api.model()
    content = request(model, 1)
    api.call("forward_backward", content, **PROTO)
    (operation,) = api.taken(model)
    api.answer(model, operation, {"loss": 1.0, "logprobs": [[0.0] * 4], "metrics": {}})
    found = api.result(f"{model}:1", allow_metadata_only=True)
    assert found["status"] == "complete_metadata"
    whole = api.call("retrieve_future", {"request_id": f"{model}:1"}, Accept=PROTO["Content-Type"])
    assert whole.headers["content-type"] == PROTO["Content-Type"]
    assert whole.content[:13] == bytes_field(1, "ArrayRecord")


def sample(sampler: str, number: int, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    params = {"max_tokens": 4, **more.pop("params", {})}
    return {
        "sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "num_samples": 2,
        "sampling_params": params, **more,
    }  # fmt: skip


def test_samples_of_a_sampler(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    saved = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "snapshot"}
    api.ask("save_weights_for_sampler", saved)
    (operation,) = api.taken(model)
    name = operation.body.model_dump()["name"]
    api.answer(model, operation, {"version": 0, "folder": "/x", "name": name})
    found = api.result(f"{model}:1")
    assert found == {
        "type": "save_weights_for_sampler", "sampling_session_id": f"{session}:sample:0",
    }  # fmt: skip
    posted = api.ask("asample", sample(f"{session}:sample:0", 0, prompt_logprobs=True))
    (operation,) = api.taken(model)
    body = operation.body.model_dump()
    assert (body["sampler"], body["prompts"], body["n"]) == (name, [[5, 6]], 2)
    assert posted["sample_sequence_ids"] == [f"{operation.id}/0/0", f"{operation.id}/0/1"]
    answer = {"id": "x", "tokens": [7], "logprobs": [-1.5], "version": 0, "stop_reason": "stop"}
    api.answer(model, operation, {"samples": [[answer, answer]], "prompt_logprobs": [[None, -2.5]]})
    found = api.result(posted["request_id"])
    assert found["prompt_logprobs"] == [None, -2.5]
    assert [each["tokens"] for each in found["sequences"]] == [[7], [7]]


SAMPLES: list[tuple[dict[str, Any], str]] = [
    ({"topk_sample_logprobs": 2}, "topk_sample_logprobs: this service does not compute"),
    ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
    ({"topk_prompt_logprobs": 21}, "at most 20"),
    ({"prompt_logprobs_last_n": 2, "prompt_logprobs": True}, "expected 1 to 1"),
    ({"params": {"max_tokens": 1 << 20}}, "more than the context"),
    ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "takes tokens only"),
]


def test_samples_that_are_refused(api: Api) -> None:
    session = api.session()
    base = api.server.calls.backend.model_name
    asked = {"session_id": session, "sampling_session_seq_id": 3, "base_model": base}
    sampler = api.ask("create_sampling_session", asked)["sampling_session_id"]
    for number, (more, says) in enumerate(SAMPLES):
        status, why = api.refused("asample", sample(sampler, number, **more))
        assert (status, says in why) == (400, True), why


STOPS: list[tuple[Any, dict[str, Any]]] = [
    ("x", {"stop": ["x"]}),
    (["x", "y"], {"stop": ["x", "y"]}),
    ([7, 8], {"stop_token_ids": [7, 8]}),
    ([], {"min_tokens": 4}),
    (None, {"stop": [], "stop_token_ids": []}),
]


def test_stops(api: Api) -> None:
    session = api.session()
    base = api.server.calls.backend.model_name
    asked = {"session_id": session, "sampling_session_seq_id": 3, "base_model": base}
    sampler = api.ask("create_sampling_session", asked)["sampling_session_id"]
    for number, (stop, given) in enumerate(STOPS):
        api.ask("asample", sample(sampler, number, params={"stop": stop}))
        row = api.server.calls.ledger.get("samplers", sampler)
        assert row is not None
        tenant = api.registry.get(row["tenant"])
        *before, operation = api.registry.operations.take(tenant.incarnation)
        assert len(before) == number  # those without an answer
        body = operation.body.model_dump()
        assert {name: body[name] for name in given} == given
        assert body["sampler"] == "@base"


def test_unknown_fields_are_named(api: Api) -> None:
    status, says = api.refused("get_info", {"model_id": "m", "colour": 1})
    assert (status, says) == (422, "colour: Extra inputs are not permitted")
    assert api.refused("get_info", json.loads('{"model_id": 5}'))[0] == 422
    assert "docs/tinker.md" in api.refused("nothing", {})[1]


def test_the_description_names_every_address(api: Api) -> None:
    found = api.ask("openapi.json", method="GET")
    assert found["openapi"] == "3.1.0"
    for path in ("asample", "forward_backward", "retrieve_future", "save_weights"):
        (content,) = found["paths"][f"/api/v1/{path}"]["post"]["requestBody"]["content"].values()
        name = content["schema"]["$ref"].rpartition("/")[2]
        assert found["components"]["schemas"][name]["properties"]
    run = found["paths"]["/api/v1/training_runs/{run}"]["get"]
    assert run["parameters"][0]["name"] == "run"
