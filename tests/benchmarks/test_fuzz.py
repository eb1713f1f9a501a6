"""`make fuzz` in short, and a case of each fault that it found."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from benchmarks.fuzz import PARSERS, fuzz, try_inputs
from benchmarks.fuzz_parsers.base import Parser, fault_of
from benchmarks.fuzz_parsers.files import CONFIG, in_order
from benchmarks.fuzz_parsers.wire import ANSWER
from mrl.run.rollouts import encode_groups
from tests.sample_groups import group

BY_NAME = {parser.name: parser for parser in PARSERS}

PASS = next(seed for seed in BY_NAME["tinker body"].seeds if seed.startswith(b"forward_backward"))


def answer(**changed: object) -> bytes:
    return json.dumps({**ANSWER, "meta_info": {**ANSWER["meta_info"], **changed}}).encode()


FOUND = [
    ("safetensors.index", json.dumps({"weight_map": {"a": "9" * 5000}}).encode()),
    ("config.json", json.dumps({**CONFIG, "rope_theta": "a\x00b"}).encode()),
    ("config.json", json.dumps({**CONFIG, "num_experts": "4"}).encode()),
    ("metrics.jsonl", b'{"step": Infinity}\n'),
    ("metrics.jsonl", b'{"step": 1' + b"0" * 400 + b"}\n"),
    ("failure.json", b"7"),
    ("rollouts", BY_NAME["rollouts"].seeds[0].replace(b"rollout_logprobs", b"rollout_logprobz")),
    ("engine answer", b"{}"),
    ("engine answer", answer(output_token_logprobs=7)),
    ("engine answer", answer(output_token_logprobs=[[float("inf"), 5], [-1.0, 6], [-1.0, 7]])),
    ("engine answer", answer(output_token_logprobs=[[-1.0, 5], [float("nan"), 6], [-1.0, 7]])),
    ("tinker body", PASS.replace(b'"beta": 0.1', b'"beta": "' + b"9" * 5000 + b'"')),
    ("reward answer", b'{"rewards": [1' + b"0" * 400 + b", 1]}"),
]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_valid_inputs_are_accepted_and_damaged_ones_are_no_fault(
    parser: Parser, tmp_path: Path
) -> None:
    for seed in parser.seeds:
        parser.read(seed, tmp_path)
    count, faults = try_inputs(parser, 17, range(50), tmp_path, seconds=0.2)
    assert count
    assert not faults


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_fuzzing_found_is_mended(name: str, data: bytes, tmp_path: Path) -> None:
    assert fault_of(BY_NAME[name], data, tmp_path) == ""


def test_the_same_number_is_the_same_input_in_every_process() -> None:
    """safetensors writes the keys of its metadata in an order of chance."""
    groups = [group([0.0, 1.0])]
    assert len({encode_groups(groups) for _ in range(50)}) > 1
    assert {in_order(encode_groups(groups)) for _ in range(50)} == {*BY_NAME["rollouts"].seeds}


def test_a_parser_that_raises_crashes_or_accepts_damage_is_a_fault(tmp_path: Path) -> None:
    def raises(data: bytes, folder: Path) -> None:
        raise KeyError("x")

    assert fault_of(Parser("p", (b"a",), raises, (ValueError,)), b"a", tmp_path) == "KeyError: 'x'"

    def dies(data: bytes, folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    row = fuzz(Parser("p", (b"a",), dies, ()), 0, 0.1)
    assert row["kinds"].keys() == {"crash"}
    assert row["faults"][0] == [0, "crash: exit code -9"]


@pytest.mark.release
def test_a_minute_of_fuzzing() -> None:
    rows = [fuzz(parser, 1, 60 / len(PARSERS)) for parser in PARSERS]
    assert not [row for row in rows if row["faults"]]
