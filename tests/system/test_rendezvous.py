"""A port that another program holds is refused in one line, before torch waits there for ever."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from mrl.errors import InputError
from mrl.system.rendezvous import check_rendezvous


@pytest.fixture
def mute() -> Iterator[int]:
    """A port whose program takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_mute_program_is_refused(mute: int) -> None:
    with pytest.raises(
        InputError, match=f"127.0.0.1:{mute}: another program listens there .no answer for 0.3 s"
    ):
        check_rendezvous("127.0.0.1", mute, 0.3)


def test_a_store_and_a_port_without_a_listener_are_taken(mute: int) -> None:
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    check_rendezvous("127.0.0.1", store.port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    check_rendezvous("127.0.0.1", free)
