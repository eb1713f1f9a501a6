"""The messages of the API that are sent as Protocol Buffers: the request of forward_backward, and the
results of forward_backward and of sampling. The constants are the numbers of fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mrl.tinker.data import MAX_INPUTS, BadDatum, Datum, Pass, Span, make_datum
from mrl.tinker.wire import (
    Value,
    WireError,
    as_bytes,
    as_double,
    as_int,
    as_ints,
    as_text,
    bytes_field,
    double_field,
    fields,
    int_field,
)

FLOAT32, INT64, INT32 = 1, 2, 3
TENSORS = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4"}
"""NumPy's dtypes by the enum DType. (bfloat16, 4, is not sent by clients.)"""
STOP, LENGTH = 0, 1
"""The enum StopReason."""
EMPTY_LOGPROB = -99999.0
"""The log-prob of an empty cell in a matrix of top-k log-probs."""


class PassHead(NamedTuple):
    """Whose pass a request asks for."""

    model_id: str
    seq_id: Any
    """The number of the request, as the client gave it."""
    forward_only: bool


def read_head(data: bytes) -> PassHead:
    """Return the head of a request of forward_backward, which may have other faults. Raises WireError
    if the bytes are not a message."""
    head = PassHead("", 0, False)
    for number, kind, value in fields(data):
        if number == 1:
            head = head._replace(model_id=as_text(kind, value))
        elif number == 2:
            head = head._replace(seq_id=as_int(kind, value))
        elif number == 6:
            head = head._replace(forward_only=bool(as_int(kind, value)))
    return head


def read_pass(data: bytes) -> Pass:
    """Return the request of forward_backward. Raises WireError if the bytes are not this message, and
    BadDatum if it cannot be trained on."""
    texts, seq_id, forward_only = {1: "", 4: ""}, 0, False
    old: dict[str, float | str] = {}
    options: dict[str, float | str] = {}
    datums: list[Datum] = []
    for number, kind, value in fields(data):
        if number in texts:
            texts[number] = as_text(kind, value)
        elif number == 2:
            seq_id = as_int(kind, value)
        elif number == 3:
            datums.append(_datum(len(datums), as_bytes(kind, value)))
        elif number == 5:
            old.update([_entry(as_bytes(kind, value), as_double, 0.0)])
        elif number == 6:
            forward_only = bool(as_int(kind, value))
        elif number == 7:
            options.update([_entry(as_bytes(kind, value), _option, 0.0)])
        else:
            raise WireError(f"forward_backward has the unknown field {number}")
    return Pass(texts[1], seq_id, texts[4], datums, options or old, forward_only)


def write_pass(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Return the result of forward_backward: the log-probs f32[N] of each datum's targets."""
    offsets = np.cumsum([0, *(each.nbytes for each in logprobs)], dtype="<i8")
    joined = b"".join(each.astype("<f4").tobytes() for each in logprobs)
    tensor = bytes_field(1, joined) + bytes_field(2, offsets.tobytes()) + int_field(3, FLOAT32)
    record = bytes_field(2, bytes_field(1, "logprobs") + bytes_field(2, tensor))
    record += int_field(3, len(logprobs))
    parts = [bytes_field(1, "ArrayRecord"), bytes_field(2, record)]
    parts += [
        bytes_field(3, bytes_field(1, name) + double_field(2, value))
        for name, value in metrics.items()
    ]
    return b"".join(parts)


def write_samples(
    answers: Sequence[Mapping[str, Any]],
    prompt_logprobs: Sequence[float | None] | None = None,
    topk_prompt_logprobs: Sequence[Any] | None = None,
    k: int = 0,
) -> bytes:
    """Return the result of sampling from one prompt.

    `answers`: for each answer its `tokens`, `logprobs` and `stop_reason`. `prompt_logprobs`: the
    log-prob of each prompt token, None for the first. `topk_prompt_logprobs`: for each prompt token
    None, or at most `k` pairs of a token and its log-prob.
    """
    parts = [bytes_field(1, _answer(each)) for each in answers]
    if prompt_logprobs is not None:
        known = [np.nan if each is None else each for each in prompt_logprobs]
        parts.append(bytes_field(2, np.array(known, "<f4").tobytes()))
    if topk_prompt_logprobs is not None and k:
        parts.append(bytes_field(3, _topk(topk_prompt_logprobs, k)))
    return b"".join(parts)


def _answer(answer: Mapping[str, Any]) -> bytes:
    reason = LENGTH if answer["stop_reason"] == "length" else STOP
    tokens = np.array(answer["tokens"], "<i4").tobytes()
    logprobs = np.array(answer["logprobs"], "<f4").tobytes()
    parts = int_field(1, reason) + bytes_field(2, tokens) + bytes_field(3, logprobs)
    if (rows := answer.get("topk_logprobs")) is not None:
        k = max((len(row) for row in rows if row), default=0)
        parts += bytes_field(4, _topk(rows, k))
    return parts


def _topk(rows: Sequence[Any], k: int) -> bytes:
    tokens = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), EMPTY_LOGPROB, "<f4")
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate((row or [])[:k]):
            tokens[i, j], logprobs[i, j] = token, logprob
    sizes = int_field(3, k) + int_field(4, len(rows))
    return bytes_field(1, tokens.tobytes()) + bytes_field(2, logprobs.tobytes()) + sizes


def _datum(place: int, data: memoryview) -> Datum:
    tokens: list[int] = []
    inputs: dict[str, NDArray[Any]] = {}
    spans: list[Span] = []
    for number, kind, value in fields(data):
        if number == 1:
            tokens += _chunk(place, as_bytes(kind, value))
        elif number == 2:
            if len(inputs) >= MAX_INPUTS:
                raise BadDatum(f"datum {place} has more than {MAX_INPUTS} inputs")
            inputs.update([_entry(as_bytes(kind, value), _tensor, np.zeros(0, np.float32))])
        elif number == 4:
            spans.append(_span(as_bytes(kind, value)))
        elif number != 3:  # the spans of the input say the same as those of the targets
            raise WireError(f"datum {place} has the unknown field {number}")
    return make_datum(place, tokens, inputs, tuple(spans))


def _chunk(place: int, data: memoryview) -> list[int]:
    tokens: list[int] = []
    for number, kind, value in fields(data):
        if number != 1:
            raise BadDatum(
                f"datum {place} has an image or sound; this server takes tokens only, so send "
                "EncodedTextChunk"
            )
        for inner, inner_kind, content in fields(as_bytes(kind, value)):
            if inner == 1:
                tokens += _array(as_bytes(inner_kind, content), "<i4").tolist()
    return tokens


def _tensor(kind: int, value: Value) -> NDArray[Any]:
    dense: memoryview | None = None
    dtype, shape = 0, list[int]()
    for number, inner, content in fields(as_bytes(kind, value)):
        if number == 1:
            dense = as_bytes(inner, content)
        elif number == 2:
            raise BadDatum(
                "an input is sparse, with several targets for each position; this server trains on one "
                "target for each position"
            )
        elif number == 3:
            dtype = as_int(inner, content)
        elif number == 4:
            shape += as_ints(inner, content)
    if dtype not in TENSORS:
        raise WireError(f"a tensor has the unknown dtype {dtype}")
    array = _array(dense if dense is not None else memoryview(b""), TENSORS[dtype])
    if not shape:
        return array
    if len(shape) > 2 or min(shape) < 0 or _product(shape) != array.size:
        raise WireError(f"a tensor of {array.size} numbers has the shape {shape[:8]}")
    return array.reshape(shape)


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _array(data: memoryview, dtype: str) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise WireError(f"{len(data)} bytes are no array of {dtype}")
    return np.frombuffer(data, dtype)


def _span(data: memoryview) -> Span:
    for number, kind, value in fields(data):
        if number not in (1, 2):
            break
        name, offset, length = "", 0, 0
        for inner, inner_kind, content in fields(as_bytes(kind, value)):
            if inner == 1:
                name = as_text(inner_kind, content)
            elif inner == 2:
                offset = as_int(inner_kind, content)
            elif inner == 3:
                length = as_int(inner_kind, content)
        if min(offset, length) < 0:
            raise WireError("a span of provenance has a negative offset or length")
        return Span(number == 2, name, offset, length)
    raise WireError("a span of provenance is neither of a prompt nor of an answer")


def _option(kind: int, value: Value) -> float | str:
    found: float | str = 0.0
    for number, inner, content in fields(as_bytes(kind, value)):
        found = as_double(inner, content) if number == 1 else as_text(inner, content)
    return found


def _entry(data: memoryview, read: Any, default: Any) -> tuple[str, Any]:
    """Return key and value of an entry of a map, whose value `read` reads."""
    key, found = "", default
    for number, kind, value in fields(data):
        if number == 1:
            key = as_text(kind, value)
        elif number == 2:
            found = read(kind, value)
    return key, found
