"""A client of a session that never gives up; its argument is the folder of the service.

It samples and trains in turn. Where the service is gone, or an operation failed, it begins again.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mrl.client import Datum, ServiceClient
from mrl.errors import InputError, RunFailed

NAME = "loop"
PAUSE_S = 0.5
ANSWER_S = 120.0


def step(client: ServiceClient, folder: Path, seed: int) -> None:
    """Do one step of the session, which is created where it is not there."""
    try:
        session = client.session(NAME)
        session.status()
    except InputError:
        output = str(folder / "runs" / NAME)
        session = client.create_session(NAME, output_dir=output, lora={"rank": 4, "alpha": 8})
    groups = session.sample([[5, 6, 7]], n=2, max_tokens=6, seed=seed).result(ANSWER_S)
    data = [
        Datum([*each.prompt, *each.tokens], weights=[0.0] * 3 + [1.0] * len(each.tokens))
        for group in groups
        for each in group
    ]
    session.forward_backward(data).result(ANSWER_S)
    session.optim_step().result(ANSWER_S)


def main() -> None:
    """Go on until the process that started this one is gone."""
    folder, parent, seed = Path(sys.argv[1]), os.getppid(), 0
    while os.getppid() == parent:
        try:
            step(ServiceClient(folder), folder, seed)
            seed += 1
        except (RunFailed, InputError, OSError, TimeoutError):
            pass  # the service is being struck
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
