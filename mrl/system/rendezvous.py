"""This module finds a port that another program holds, before torch waits there for ever.

The client of torch's TCPStore has a limit for the connection, and none for the first answer.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

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
