"""Routes past SGLang's messages: what is laid down is read once, freed, and bounded."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_helpers import generate, make_prompts, make_requests

from mrl.engines.base import SamplingParams
from mrl.engines.sglang.route_memory import (
    PAGE,
    VARIABLE,
    Reference,
    RouteReader,
    RouteWriter,
    find_reference,
    make_writer,
)
from mrl.system.shared_memory import Handle

LONG = SamplingParams(40, 40)


@pytest.fixture
def reader() -> RouteReader:
    return RouteReader()


def writer_of(reader: RouteReader, **options: int) -> RouteWriter:
    pid, fd, nonce = json.loads(reader.environment[VARIABLE])
    return RouteWriter(Handle(pid, fd, bytes.fromhex(nonce)), **options)


def through_sglang(reference: Reference) -> Reference | None:
    """Encode and find the reference as the detokenizer does."""
    return find_reference(base64.b64encode(reference.as_tensor().numpy().tobytes()).decode())


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, "uint8"), (256, "uint16"), (65535, "uint16"), (65536, "int32")]
)
def test_numbers_take_the_bytes_that_they_need(reader, largest: int, dtype: str) -> None:
    writer = writer_of(reader)
    for routes in (
        torch.tensor([[[0, largest]], [[1, 2]]], dtype=torch.int32),
        torch.empty(0, 3, 2),
    ):
        reference = writer.add(routes.int())
        assert reference is not None
        assert reference.dtype == (dtype if routes.numel() else "int32")
        assert through_sglang(reference) == reference
        assert reader.take(reference).tolist() == routes.flatten().int().tolist()
    negative = writer.add(torch.tensor([[[-1, 0]]], dtype=torch.int32))
    assert negative is not None
    assert reader.take(negative).tolist() == [-1, 0]
    assert writer.num_bytes == 0


def test_routes_themselves_are_no_reference() -> None:
    assert find_reference(base64.b64encode(np.arange(99, dtype="<i4").tobytes()).decode()) is None
    assert find_reference("") is None


def test_what_nobody_reads_is_freed_by_the_next_call(reader) -> None:
    writer = writer_of(reader)
    routes = torch.zeros(PAGE + 1, 1, 1, dtype=torch.int32)
    for _ in range(2):
        assert writer.add(routes) is not None
    assert writer.num_bytes == 4 * PAGE
    reader.begin()
    kept = writer.add(routes + 7)
    assert writer.num_bytes == 2 * PAGE
    assert set(reader.take(kept).tolist()) == {7}
    assert writer.num_bytes == 0


def test_too_much_goes_the_other_way(reader) -> None:
    writer = writer_of(reader, max_bytes=2 * PAGE)
    routes = torch.zeros(PAGE, 1, 1, dtype=torch.int32)
    first = writer.add(routes)
    assert writer.add(routes) is not None
    assert writer.add(routes) is None
    reader.take(first)
    assert writer.add(routes) is not None


def test_a_closed_reader_gets_no_references(reader) -> None:
    writer = writer_of(reader)
    routes = torch.zeros(1, 1, 1, dtype=torch.int32)
    assert writer.add(routes) is not None
    reader.is_open = False
    reader.begin()
    assert writer.add(routes) is None
    assert writer.num_bytes == 0


def test_who_cannot_read_the_trainer_writes_nothing(reader, monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert make_writer() is None
    monkeypatch.setenv(VARIABLE, reader.environment[VARIABLE])
    assert make_writer() is not None
    pid, fd, nonce = json.loads(reader.environment[VARIABLE])
    monkeypatch.setenv(VARIABLE, json.dumps([pid, fd, nonce[::-1]]))  # another file of that number
    assert make_writer() is None
    gone = Reference(pid, 10**6, 0, 1, "uint8")
    with pytest.raises(RuntimeError, match=f"memory of process {pid}"):
        reader.take(gone)


def test_routes_of_a_server_are_the_same_on_both_ways(engine, monkeypatch) -> None:
    """And all of them take the way through memory, aborted ones too."""
    shape = engine.core.launch.shape
    per_row = shape.num_hidden_layers * shape.topk

    def run() -> tuple[list[torch.Tensor], int]:
        before = engine.core.routes.num_bytes
        groups = generate(engine, make_prompts(4), samples_per_prompt=2, sampling=LONG, seed=3)
        ids = [sample.routing.expert_ids for group in groups for sample in group.samples]
        return ids, engine.core.routes.num_bytes - before

    ids, num_bytes = run()
    assert num_bytes == per_row * sum(map(len, ids)) > 0
    aborted = []
    for completion in engine.endpoint.generate(make_requests(6, SamplingParams(400, 400))):
        aborted.append(completion)
        engine.endpoint.abort()
    assert {c.finish_reason for c in aborted} <= {"abort", "length"}
    for _ in engine.endpoint.generate(make_requests(4, LONG)):
        break  # the others' answers are never read
    again, _ = run()
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.routes, "is_open", False)
        base64_ids, num_bytes = run()
    assert num_bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(ids, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ids, base64_ids, strict=True))


def test_the_memory_goes_with_the_server(engine) -> None:
    generate(engine, make_prompts(1), samples_per_prompt=1, sampling=LONG, seed=3)
    held = []
    for process in engine.connection.process.tree():
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                held += [name for name in [os.readlink(file)] if "mrl-route-memory" in name]
    assert held == ["/memfd:mrl-route-memory (deleted)"]  # one scheduler, and no name in any folder
