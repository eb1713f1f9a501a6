"""Finds and checks the addresses at which ranks meet to form a process group.

All ranks must be able to reach the address, and no other program may use the port. If another
program used the port, torch would wait forever: the client of torch's TCPStore has a time limit for
the connection, but no time limit for the first answer.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

from mrl.errors import InputError
from mrl.system.proc import kernel_and_namespace

CONNECT_S = 5.0
ANSWER_S = 30.0
"""Seconds that another rank's store may take to answer. The store runs in a thread of its own, so
it answers even if the rank is busy."""


def check_rendezvous(host: str, port: int, answer_s: float = ANSWER_S) -> None:
    """Raise InputError if the program that listens at `host:port` does not answer like torch's store.

    If no program listens yet, there is no error, because one of the ranks will listen later. Torch
    waits for that rank with a time limit.
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

    thread = threading.Thread(target=ask, daemon=True)  # its wait has no time limit
    thread.start()
    thread.join(answer_s)
    if answers == [""]:
        return
    what = f"it says: {answers[0]}" if answers else f"no answer for {answer_s:g} s"
    raise InputError(
        f"the ranks cannot meet at {host}:{port}: another program listens there ({what}); end it, or "
        "choose another port (--rdzv-endpoint HOST:PORT or --master-port of mrl.launch and torchrun, "
        "PORT of launch/slurm/train.sbatch)"
    )


def listen_for(hosts: Collection[str]) -> socket.socket:
    """Return a socket that listens on a free port at an address of this machine that `hosts` can reach.

    `hosts` are host names, which may include the name of this machine. These addresses are tried in
    order: the rendezvous address (MASTER_ADDR), the address of this machine's host name, and the
    addresses from which this machine reaches the other hosts. Loopback addresses are skipped if
    there are other hosts. 127.0.0.1 is the last resort. Raises OSError if no address works.
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
    """Return a text that is equal for processes that can reach each other at a loopback address.

    It identifies the running kernel and the network namespace. A host name is not sufficient, because
    several hosts and containers may have the same name.
    """
    return kernel_and_namespace("net") or socket.gethostname()


def address_towards(host: str) -> str:
    """Return the address of this machine from which it would reach `host`, without sending anything.

    The result is empty if the name `host` cannot be resolved or there is no route to the host.
    """
    with suppress(OSError):
        family, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return probe.getsockname()[0]
    return ""
