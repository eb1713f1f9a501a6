"""The messages that are sent as Protocol Buffers, and what is read of bytes that are none."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from mrl.tinker.data import BadDatum
from mrl.tinker.messages import read_pass, write_pass, write_samples
from mrl.tinker.wire import WireError, bytes_field, double_field, fields, int_field


def tensor(values: Any, dtype: str, kind: int, shape: list[int] | None = None) -> bytes:
    array = np.array(values, dtype)
    sizes = b"".join(int_field(4, size) for size in shape or array.shape)
    return bytes_field(1, array.tobytes()) + int_field(3, kind) + sizes


def entry(key: str, value: bytes) -> bytes:
    return bytes_field(1, key) + bytes_field(2, value)


def chunk(tokens: list[int]) -> bytes:
    return bytes_field(1, bytes_field(1, np.array(tokens, "<i4").tobytes()))


def datum(tokens: list[int], **inputs: bytes) -> bytes:
    parts = [bytes_field(1, chunk(tokens))]
    return b"".join(parts + [bytes_field(2, entry(name, each)) for name, each in inputs.items()])


TARGETS = tensor([6, 7], "<i8", 2)
WEIGHTS = tensor([0.5, -2.0], "<f4", 1)
SPAN = bytes_field(2, bytes_field(1, "ab-1/0/2") + int_field(2, 3) + int_field(3, 2))
REQUEST = b"".join(
    [
        bytes_field(1, "s:train:0"),
        int_field(2, 9),
        bytes_field(
            3, datum([5, 6], target_tokens=TARGETS, weights=WEIGHTS) + bytes_field(4, SPAN)
        ),
        bytes_field(4, "ppo"),
        bytes_field(5, bytes_field(1, "old") + double_field(2, 1.0)),
        int_field(6, 1),
        bytes_field(7, entry("clip", double_field(1, 0.25))),
    ]
)


def test_a_request_is_read() -> None:
    given = read_pass(REQUEST)
    assert (given.model_id, given.seq_id, given.loss) == ("s:train:0", 9, "ppo")
    assert given.forward_only
    assert given.options == {"clip": 0.25}  # the newer map has all options of the older one
    (one,) = given.data
    assert one.tokens == [5, 6]
    assert one.inputs["target_tokens"].tolist() == [6, 7]
    assert one.inputs["weights"].tolist() == [0.5, -2.0]
    assert [(s.is_sampled, s.sequence_id, s.offset, s.length) for s in one.spans] == [
        (True, "ab-1/0/2", 3, 2)
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (datum([5], target_tokens=tensor([[1, 2]], "<i8", 2)), r"shape \[1, 2\].*expected \[1\]"),
        (datum([5, 6], target_tokens=tensor([1], "<i8", 2)), "1 numbers for 2 tokens"),
        (datum([5], weights=tensor([1.0], "<f4", 1)), "target_tokens is missing"),
        (datum([5], target_tokens=tensor([1.0], "<f4", 1)), "holds float32s"),
        (datum([], target_tokens=tensor([], "<i8", 2)), "has no token"),
        (
            datum([5], target_tokens=tensor([1], "<i8", 2), weights=tensor([np.nan], "<f4", 1)),
            "not finite",
        ),
        (bytes_field(1, bytes_field(2, b"png")), "an image or sound"),
        (datum([5], target_tokens=bytes_field(2, b"")), "sparse"),
    ],
)
def test_what_cannot_be_trained_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(BadDatum, match=says):
        read_pass(bytes_field(3, content))


@pytest.mark.parametrize(
    "content",
    [
        b"\x08",  # a tag without a value
        b"\x0a\x05ab",  # bytes that end after the message
        b"\x08" + b"\xff" * 10 + b"\x01",  # a number of more than 64 bits
        b"\x0b",  # a group
        b"\x00\x01",  # the field 0
        int_field(99, 1),
        int_field(1, 1),  # a number where a text should be
        bytes_field(1, b"\xff"),
        bytes_field(3, datum([5], target_tokens=tensor([1], "<i8", 9))),
        bytes_field(3, datum([5], target_tokens=tensor([1], "<i8", 2, [1 << 40, 1 << 40]))),
        bytes_field(3, datum([5], target_tokens=bytes_field(1, b"123") + int_field(3, 2))),
    ],
)
def test_bytes_that_are_no_request_are_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        read_pass(content)


def test_random_changes_never_break_the_reader() -> None:
    draw = random.Random(7)
    for _ in range(5_000):
        content = bytearray(REQUEST)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(content))
            match draw.randrange(3):
                case 0:
                    content[at] = draw.randrange(256)
                case 1:
                    del content[at : at + draw.randrange(1, 9)]
                case _:
                    content[at:at] = draw.randbytes(draw.randrange(1, 5))
            if not content:
                break
        with suppress(WireError, BadDatum):
            read_pass(bytes(content))


def parsed(content: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for number, _, value in fields(content):
        found.setdefault(number, []).append(value if isinstance(value, int) else bytes(value))
    return found


def test_results_are_written() -> None:
    content = parsed(
        write_pass([np.array([-1, -2], "f4"), np.array([-3], "f4")], {"loss:sum": 6.0})
    )
    assert content[1] == [b"ArrayRecord"]
    record = parsed(content[2][0])
    assert record[3] == [2]
    field = parsed(record[2][0])
    batched = parsed(field[2][0])
    assert field[1] == [b"logprobs"]
    assert np.frombuffer(batched[1][0], "<f4").tolist() == [-1, -2, -3]
    assert np.frombuffer(batched[2][0], "<i8").tolist() == [0, 8, 12]
    metric = parsed(content[3][0])
    assert (metric[1], struct.unpack("<d", metric[2][0])) == ([b"loss:sum"], (6.0,))
    answers = [{"tokens": [4, 5], "logprobs": [-1.0, -0.5], "stop_reason": "length"}]
    content = parsed(write_samples(answers, [None, -2.0], [None, [(7, -0.1)]], 2))
    sequence = parsed(content[1][0])
    assert sequence[1] == [1]
    assert np.frombuffer(sequence[2][0], "<i4").tolist() == [4, 5]
    assert np.isnan(np.frombuffer(content[2][0], "<f4")[0])
    top = parsed(content[3][0])
    assert np.frombuffer(top[1][0], "<i4").tolist() == [0, 0, 7, 0]
    assert (top[3], top[4]) == ([2], [2])
