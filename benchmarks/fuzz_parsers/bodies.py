"""This module has the parsers of what clients send to the service and to the Tinker API: bodies of
JSON, messages of Protocol Buffers, and zstd."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import zstandard
from pydantic import BaseModel, ValidationError

from benchmarks.fuzz_parsers.base import Parser, require
from mrl.errors import InputError
from mrl.service.bodies import Change, Pause, read_new
from mrl.service.sessions.bodies import MAX_TOKENS, Bounds, num_tokens
from mrl.service.sessions.bodies import read_body as read_operation
from mrl.service.tokenizer import BODIES
from mrl.tinker import bodies, paths
from mrl.tinker.data import BadDatum, Pass
from mrl.tinker.messages import read_pass, write_pass
from mrl.tinker.wire import WireError, bytes_field, double_field, int_field
from mrl.web.limits import Limits, Refused
from mrl.web.reading import decompressed, read_object
from tests.tinker.test_wire import REQUEST, datum, entry, tensor

DEPTH = Limits().depth
MOST = 1 << 18
"""Bytes that may be decompressed; the service allows 8 MiB."""
BOUNDS = Bounds(128, 64)
DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [6, 7], "dtype": "int64", "shape": [2]},
        "weights": {"data": [0.5, -1.0], "dtype": "float32", "shape": [2]},
    },
}
SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}, "num_samples": 2,
    "sampling_params": {"max_tokens": 4, "stop": ["a"], "temperature": 0.5, "top_k": 3, "seed": 1},
    "sampling_session_id": "s:sample:0", "seq_id": 1, "prompt_logprobs": True,
    "topk_prompt_logprobs": 2,
}  # fmt: skip
KINDS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "create_session": (bodies.CreateSession, {
        "tags": ["a"], "user_metadata": {"b": "c"}, "sdk_version": "0.38.0"}),
    "session_heartbeat": (bodies.Heartbeat, {"session_id": "s"}),
    "create_model": (bodies.CreateModel, {
        "session_id": "s", "model_seq_id": 0, "base_model": "m",
        "lora_config": {"rank": 4, "seed": 1, "train_mlp": True}}),
    "optim_step": (bodies.OptimStep, {
        "model_id": "m", "seq_id": 3, "adam_params": {"learning_rate": 1e-3, "beta1": 0.9}}),
    "save_weights": (bodies.SaveWeights, {
        "model_id": "m", "path": "a-1", "seq_id": 4, "ttl_seconds": 7200}),
    "save_weights_for_sampler": (bodies.SaveForSampler, {
        "model_id": "m", "seq_id": 4, "sampling_session_seq_id": 2, "kind": "inflight"}),
    "load_weights": (bodies.LoadWeights, {
        "model_id": "m", "seq_id": 5, "path": "tinker://a:train:0/weights/b", "optimizer": True}),
    "create_sampling_session": (bodies.CreateSampler, {
        "session_id": "s", "sampling_session_seq_id": 0,
        "model_path": "tinker://a:train:0/sampler_weights/b"}),
    "asample": (bodies.Sample, SAMPLE),
    "forward_backward": (bodies.JsonPass, {
        "model_id": "m", "seq_id": 1,
        "forward_backward_input": {
            "data": [DATUM], "loss_fn": "cross_entropy", "loss_fn_config": {"beta": 0.1}}}),
    "forward": (bodies.JsonPass, {
        "model_id": "m", "seq_id": 1,
        "forward_input": {"data": [DATUM], "loss_fn": "cross_entropy"}}),
    "retrieve_future": (bodies.Retrieve, {"request_id": "m:1", "allow_metadata_only": True}),
    "ttl": (bodies.Ttl, {"ttl_seconds": 7200}),
}  # fmt: skip
OPERATIONS: tuple[dict[str, Any], ...] = (
    {"kind": "sample", "prompts": [[5, 6]], "max_tokens": 4, "n": 2, "stop": ["a"], "seed": 1},
    {"kind": "optim_step", "lr": 1e-3, "beta1": 0.9, "clip_grad": 1.0},
    {"kind": "save", "name": "a"},
    {"kind": "load", "version": 3},
    {"kind": "forward", "sequences": [{"tokens": [5, 6, 7]}]},
    {"kind": "forward_backward", "loss": "ppo", "clip_low": 0.2, "sequences": [
        {"tokens": [5, 6], "advantages": [0.0, 1.0], "logprobs": [0.0, -1.0], "sample": "1/0/0"}]},
    {"kind": "forward_backward", "loss": "cross_entropy", "sequences": [
        {"tokens": [5, 6], "targets": [5, 7], "weights": [0.0, 1.0]}]},
)  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "new": {"name": "a", "recipe": {"lora": {"rank": 4}}, "weight": 2.0, "key": "k-1"},
    "pause": {"reason": "lunch", "sequence": 3},
    "change": {"sequence": 3},
    "encode": {"texts": ["abc", "d"]},
    "encode_chat": {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "x"}]},
    "decode": {"tokens": [[5, 6], [7]], "skip_special": True},
}


class Rejected(Exception):
    """A body is refused with a status below 500."""


def _named(name: str, body: Any) -> bytes:
    """Return a body after the name of what reads it."""
    return f"{name}\n{json.dumps(body)}".encode()


def _object(data: bytes) -> dict[str, Any]:
    try:
        return read_object(data, DEPTH)
    except Refused as error:
        require(400 <= error.status < 500, f"status {error.status}")
        raise Rejected from None


def _tinker_body(data: bytes, folder: Path) -> None:
    name, _, body = data.partition(b"\n")
    kind = KINDS.get(name.decode(errors="replace"))
    if kind is None:
        raise Rejected
    given = _object(body)
    try:
        found = bodies.read(kind[0], given)
        if isinstance(found, bodies.JsonPass):
            _check_pass(found.as_pass(forward_only=name == b"forward"))
        elif isinstance(found, bodies.Sample):
            require(all(0 <= t < 1 << 31 for t in found.prompt.ints("the prompt")), "a token")
        elif isinstance(found, (bodies.LoadWeights, bodies.CreateSampler)):
            path = getattr(found, "path", None) or getattr(found, "model_path", None) or ""
            require(str(paths.parse(path)) == path, f"the path {path!r}")
    except Refused as error:
        require(400 <= error.status < 500, f"status {error.status}")
        raise Rejected from None
    json.dumps(found.model_dump(), allow_nan=False).encode()  # as it is kept


def _check_pass(found: Pass) -> None:
    for each in found.data:
        for name, values in each.inputs.items():
            require(values.shape == (len(each.tokens),), f"{name} has {values.shape}")
            require(bool(abs(values.astype(float)).max() < math.inf), f"{name} is not finite")


def _tinker_message(data: bytes, folder: Path) -> None:
    found = read_pass(data)
    _check_pass(found)
    json.dumps([found.model_id, found.seq_id, found.loss, dict(found.options)]).encode()
    write_pass([each.inputs["target_tokens"].astype("<f4") for each in found.data], {"a": 1.0})


def _zstd(data: bytes, folder: Path) -> None:
    try:
        found = decompressed(data, MOST)
    except Refused as error:  # as some of the seeds are
        require(error.status in (400, 413), f"status {error.status}")
    else:
        require(len(found) <= MOST, f"{len(found)} bytes")


def _operation(data: bytes, folder: Path) -> None:
    found = read_operation(_object(data), BOUNDS)
    require(num_tokens(found) <= MAX_TOKENS, "too many tokens")
    json.dumps(found.model_dump(), allow_nan=False).encode()


def _other(data: bytes, folder: Path) -> None:
    name, _, body = data.partition(b"\n")
    kinds: dict[bytes, Any] = {b"pause": Pause, b"change": Change}
    kinds |= {action.encode(): kind for action, kind in BODIES.items()}
    if name not in (*kinds, b"new"):
        raise Rejected
    given = _object(body)
    try:
        found = read_new(given) if name == b"new" else kinds[name].model_validate(given)
    except Refused as error:
        require(error.status == 400, f"status {error.status}")
        raise Rejected from None
    json.dumps(found.model_dump(), allow_nan=False).encode()


def _messages() -> tuple[bytes, ...]:
    """Return messages with each kind of field."""
    old = b"".join([
        bytes_field(1, "m"), int_field(2, 1), bytes_field(4, "dro"),
        bytes_field(3, datum([5, 6], target_tokens=tensor([6, 7], "<i4", 3))),
        bytes_field(7, entry("beta", double_field(1, 0.05))),
        bytes_field(7, entry("name", bytes_field(2, "x"))),
    ])  # fmt: skip
    many = b"".join(
        [
            bytes_field(1, "m"),
            *(
                bytes_field(3, datum([n, 6], target_tokens=tensor([6, 7], "<i8", 2, [2])))
                for n in range(4)
            ),
        ]
    )
    return REQUEST, old, many


def _frames() -> tuple[bytes, ...]:
    """Return zstd frames of a request, of two frames after each other, of 64 MiB of zeros with and
    without its size in the head, and with a window that is larger than is allowed."""
    small, parts = zstandard.ZstdCompressor(), zstandard.ZstdCompressor(level=1).compressobj()
    zeros = bytes(1 << 20)
    stream = b"".join([*(parts.compress(zeros) for _ in range(64)), parts.flush()])
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    window = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    far = window.compress(b"abc" * 99) + window.flush()
    whole = small.compress(bytes(64 << 20))
    return small.compress(REQUEST), small.compress(REQUEST) * 2, stream, whole, far


PARSERS = (
    Parser("tinker body", tuple(_named(name, body) for name, (_, body) in KINDS.items()),
           _tinker_body, (Rejected, BadDatum), share=4),
    Parser("tinker message", _messages(), _tinker_message, (WireError, BadDatum), share=4),
    Parser("zstd body", _frames(), _zstd, (), share=4),
    Parser("operation", tuple(json.dumps(each).encode() for each in OPERATIONS),
           _operation, (Rejected, InputError)),
    Parser("service body", tuple(_named(name, body) for name, body in OTHERS.items()),
           _other, (Rejected, ValidationError)),
)  # fmt: skip
