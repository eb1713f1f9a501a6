"""The results of requests, in the API's forms."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrl.tinker.backend import UNFINISHED, Backend, Row
from mrl.tinker.messages import write_pass, write_samples
from mrl.web.limits import Refused

COUNTS = (
    "session/replayed_rows",
    "session/native_rows",
    "session/ambiguous_rows",
    "train/shared_tokens",
)
"""Metrics of an operation that are numbers of tokens: those of several requests are added up, others
averaged."""
LOST_MODEL = (
    "; load a checkpoint, or make a new training client from one with "
    "create_training_client_from_state_with_optimizer"
)
Answer = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A result in one of its two forms."""

    json: Answer
    proto: bytes | None = None
    """None for results that have the form of JSON alone."""


class Futures:
    """Looks up results."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def request(self, owner: str, request: str) -> Row:
        """Return a request that `owner` has made. Raises Refused."""
        return self._backend.owned("requests", owner, request)

    def find(self, row: Row) -> Result | None:
        """Return the result of a request, or its failure in the SDK's form; None if it is not done.

        Raises Refused with 410 if a sample was lost, so that the SDK samples again.
        """
        if row["kind"] == "unload_model":
            return Result({"type": "unload_model", "model_id": row["id"].rpartition(":")[0]})
        if row["kind"] == "create_model":
            return self._created(row)
        found = self._backend.look(row)
        if found["state"] in UNFINISHED:
            return None
        if found["state"] == "done":
            return _done(row, found["result"])
        reason = found["reason"] + self._why(row)
        if found["state"] == "failed":
            return failure(reason, "user")
        if row["kind"] == "sample":
            raise Refused(410, reason)
        return failure(reason + LOST_MODEL, "server")

    def cancel(self, owner: str, request: str) -> None:
        """Cancel a sample that waits. One that is under way is finished, and so is every other request:
        an optimizer step would otherwise lack the gradients of a pass that was cancelled."""
        row = self._backend.owned("requests", owner, request)
        if row["kind"] != "sample":
            return
        tenant = self._backend.tenant(row["tenant"])
        if tenant is not None and row["operation"]:
            self._backend.registry.operations.cancel(tenant.incarnation, row["operation"])

    def _created(self, row: Row) -> Result | None:
        """Return the result of create_model: the model, once its session is open."""
        tenant = self._backend.tenant(row["tenant"])
        if tenant is None or tenant.state not in UNFINISHED:
            return failure(f"the model was not created{self._why(row)}", "user")
        if not self._backend.is_open(tenant):
            return None
        return Result({"type": "create_model", "model_id": row["id"].rpartition(":")[0]})

    def _why(self, row: Row) -> str:
        tenant = self._backend.tenant(row["tenant"])
        if tenant is None:
            return " (it was removed)"
        return f" (the model is {tenant.state}: {tenant.reason})" if tenant.reason else ""


def failure(reason: str, category: str) -> Result:
    """Return a failure, which the SDK raises as RequestFailedError. `category` is `user`, `server` or
    `unknown`."""
    return Result({"error": " ".join(reason.split())[:2000], "category": category})


def _done(row: Row, result: Mapping[str, Any]) -> Result:
    about = row["about"]
    match row["kind"]:
        case "forward" | "forward_backward":
            return _passed(row["kind"], about, result)
        case "sample":
            return _sampled(about, result)
        case "optim_step":
            names = {"unclipped_grad_l2:mean": "grad_norm", "learning_rate:mean": "lr"}
            metrics = {ours: result[name] for ours, name in names.items()}
            return Result({"metrics": {**_finite(metrics), "version:max": result["version"]}})
        case "load_weights":
            return Result(
                {"type": "load_weights", "path": about["path"], "model_id": about["model"]}
            )
    path = {"path": about["path"]}
    if about["sampler"]:
        return Result({"type": "save_weights_for_sampler", "sampling_session_id": about["sampler"]})
    kinds = {"training": "save_weights", "sampler": "save_weights_for_sampler"}
    return Result({"type": kinds.get(about["kind"], "save_weights_external"), **path})


def _passed(kind: str, about: Mapping[str, Any], result: Mapping[str, Any]) -> Result:
    """Return log-probs in the API's order, in which the first belongs to the first target."""
    logprobs = [
        np.array([np.nan if v is None else v for v in each[1:]], np.float32)
        for each in result["logprobs"]
    ]
    if kind == "forward":
        parts = [
            -float(
                np.dot(np.ones(len(each)) if w is None else np.asarray(w), each.astype(np.float64))
            )
            for each, w in zip(logprobs, about["weights"], strict=True)
        ]
        metrics = {"loss:sum": math.fsum(parts)}
    else:
        metrics = {"loss:sum": result["loss"]}
        for name, value in result["metrics"].items():
            metrics[f"{name}:{'sum' if name in COUNTS else 'mean'}"] = value
    metrics = _finite(metrics)
    outputs = [
        {"logprobs": {"data": each.tolist(), "dtype": "float32", "shape": [len(each)]}}
        for each in logprobs
    ]
    shown = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": metrics}
    return Result(shown, write_pass(logprobs, metrics))


def _sampled(about: Mapping[str, Any], result: Mapping[str, Any]) -> Result:
    (answers,) = result["samples"]
    prompt: Sequence[Any] | None = None
    top: Sequence[Any] | None = None
    if about["prompt_logprobs"]:
        (prompt,) = result["prompt_logprobs"]
    if about["top"]:
        (top,) = result["top_prompt_logprobs"]
    prompt, top = _keep_last(prompt, about["last_n"]), _keep_last(top, about["last_n"])
    sequences = [
        {
            "stop_reason": "length" if each["stop_reason"] == "length" else "stop",
            "tokens": each["tokens"],
            "logprobs": each["logprobs"],
        }
        for each in answers
    ]
    shown = {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": prompt,
        "topk_prompt_logprobs": top,
    }
    return Result(shown, write_samples(sequences, prompt, top, about["top"]))


def _keep_last(rows: Sequence[Any] | None, number: int | None) -> Sequence[Any] | None:
    """Return `rows` with None in the place of all but the last `number`; all if that is None."""
    if rows is None or number is None:
        return rows
    return [None] * (len(rows) - number) + list(rows[-number:])


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def as_json(answer: Answer) -> bytes:
    """Return a result as JSON text, in which numbers that are not finite are null."""
    return json.dumps(_nulls(answer)).encode()


def _nulls(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _nulls(inner) for key, inner in value.items()}
    return [_nulls(inner) for inner in value] if isinstance(value, list) else value
