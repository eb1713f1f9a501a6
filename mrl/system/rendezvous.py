"""This module finds where ranks meet: an address that others reach, a port that no program holds.

torch would wait at such a port for ever: the client of its TCPStore has a limit for the connection, and
none for the first answer.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

from mrl.errors import InputError

CONNECT_S = 5.0
ANSWER_S = 30.0
"""How long the store of another rank may take to answer: it does so in a thread of its own."""


def check_rendezvous(host: str, port: int, answer_s: float = ANSWER_S) -> None:
    """Raise InputError where something listens at `host:port` that does not answer as torch's store.

    Where nobody listens yet, one of the ranks will; torch waits for that, and has a limit.
    """
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        return
    answers: list[str] = []

    def ask() -> None:
        from torch.distributed import TCPStore

        try:
            TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=answer_s),
            )
        except (RuntimeError, ValueError) as error:
            answers.append(str(error).splitlines()[0])
        else:
            answers.append("")

    thread = threading.Thread(target=ask, daemon=True)  # nothing ends its wait
    thread.start()
    thread.join(answer_s)
    if answers == [""]:
        return
    what = f"it says: {answers[0]}" if answers else f"it is mute for {answer_s:g} s"
    raise InputError(
        f"the ranks cannot meet at {host}:{port}: another program listens there ({what}); end it, or "
        "choose another port (--rdzv-endpoint HOST:PORT or --master-port of mrl.launch and torchrun, "
        "PORT of launch/slurm/train.sbatch)"
    )


def listen_for(hosts: Collection[str]) -> socket.socket:
    """Listen at a free port where `hosts` reach this machine: at the address by which they have met it.

    A host may know its own names as a loopback address only: then at the address by which it reaches
    the others, and where there is none, at a loopback address.
    """
    others = set(hosts) - {socket.gethostname()}
    names = (os.environ.get("MASTER_ADDR", ""), socket.gethostname(), *map(address_towards, others))
    for host in (*names, "127.0.0.1"):
        with suppress(OSError, ValueError):
            family, *_, where = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)[0]
            if host == "127.0.0.1" or not (others and ip_address(where[0]).is_loopback):
                return socket.create_server(where[:2], family=family)
    raise OSError("no socket can listen at 127.0.0.1")


def own_network() -> str:
    """Return what two processes have in common that reach each other at a loopback address: the kernel
    and its network namespace. The name of the host says less, as hosts and containers may share one."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def address_towards(host: str) -> str:
    """Return the address of this machine by which it reaches `host`, empty where it does not know that
    name. Nothing is sent."""
    with suppress(OSError):
        family, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return probe.getsockname()[0]
    return ""
