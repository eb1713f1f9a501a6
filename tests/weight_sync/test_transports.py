"""Transports are found by name, and one file is all that another transport needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.engines.handles import flat_of
from mrl.errors import InputError
from mrl.types import WeightBucket
from mrl.weight_sync import transports
from mrl.weight_sync.engine_group import EngineGroup
from mrl.weight_sync.load import Canaries
from mrl.weight_sync.staging import Staging, header_of
from mrl.weight_sync.transports import check_transport, local_buckets, make_receiver, make_sender
from tests.disaggregated.test_weights import CPU, assert_same, expected, held, make_buckets

NOWHERE = ("127.0.0.1", 0)


def test_names_and_what_they_serve() -> None:
    for name in ("tensor", "disk"):
        check_transport(name, is_disaggregated=False)
    check_transport("tensor", is_disaggregated=True)
    with pytest.raises(
        InputError, match="weight_sync is disk, which is for engines on the trainer"
    ):
        check_transport("disk", is_disaggregated=True)
    for name in ("disc", "os", "os.path", "tests/weight_sync/test_transports.py"):
        with pytest.raises(InputError, match=r"expected one of disk, .*tensor"):
            check_transport(name, is_disaggregated=False)


def test_only_engines_of_several_ranks_that_read_memory_need_handles() -> None:
    group: Any = SimpleNamespace(size=2, exchange=lambda own: [own, own])
    for name, size, sends_adapter, has_handles in [
        ("tensor", 2, False, True), ("tensor", 2, True, False), ("disk", 2, False, False),
        ("tensor", 1, False, False),
    ]:  # fmt: skip
        chosen = group if size == 2 else EngineGroup(None)
        buckets = local_buckets(name, make_buckets(1), chosen, sends_adapter=sends_adapter)
        assert cast(Any, buckets)._has_handles == has_handles


class Sender:
    """Writes versions into files."""

    folder: Path

    def __init__(
        self, address: tuple[str, int], timeout_s: float, device: torch.device
    ) -> None: ...

    def send(
        self,
        buckets: Iterable[WeightBucket],
        version: int,
        names: Sequence[str],
        canaries: Canaries,
    ) -> list[str]:
        parts = [(header_of(bucket), flat_of(bucket).clone()) for bucket in buckets]
        for name in names:
            save_file({str(i): flat for i, (_, flat) in enumerate(parts)}, self.folder / name)
        Receiver.headers = [header for header, _ in parts]
        return []

    def keep(self, names: Collection[str]) -> None: ...

    def close(self) -> None: ...


class Receiver:
    headers: list[dict[str, Any]]

    def __init__(
        self, address: tuple[str, int], name: str, timeout_s: float, device: torch.device
    ) -> None:
        self._name = name

    def receive(self, staging: Staging, version: int) -> None:
        staging.begin(version, None)
        for number, flat in sorted(load_file(Sender.folder / self._name).items()):
            staging.room(self.headers[int(number)]).copy_(flat)
        staging.finish()

    def close(self) -> None: ...


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A transport of this test's own, which offers no `Push`."""
    Sender.folder = tmp_path
    module = SimpleNamespace(Sender=Sender, Receiver=Receiver)
    load = transports._load
    monkeypatch.setattr(transports, "_load", lambda name: module if name == "x" else load(name))
    return "x"


def test_a_transport_says_whether_it_sends_deltas(files: str) -> None:
    check_transport("tensor", is_disaggregated=True, sends_deltas=True)
    with pytest.raises(InputError, match=r"weight_encoding is delta, but the transport .*=x sends"):
        check_transport(files, is_disaggregated=True, sends_deltas=True)
    assert cast(Any, make_sender("tensor", NOWHERE, 1.0, CPU, 3))._max_deltas == 3


def test_another_transport_brings_a_version_to_a_worker(files: str) -> None:
    check_transport(files, is_disaggregated=True)
    sender = make_sender(files, NOWHERE, 1.0, CPU)
    receiver, staging = make_receiver(files, NOWHERE, "one", 1.0, CPU), Staging()
    assert sender.send(make_buckets(1), 1, ["one"], Canaries([], [])) == []
    receiver.receive(staging, 1)
    assert_same(held(staging), expected(1))
    group = cast(Any, SimpleNamespace(size=2, exchange=lambda own: [own, own]))
    assert cast(Any, local_buckets(files, make_buckets(1), group, sends_adapter=False))._has_handles
