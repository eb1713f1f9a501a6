"""What a run starts does not die of a signal that is meant for its ranks."""

import signal
from pathlib import Path

from mrl.rollout.sglang.process import ServerProcess
from mrl.system.processes import JsonWorker
from tests.waiting import LIMIT_S


def test_a_worker_never_gets_sigusr1() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    worker = JsonWorker("tests.system.blocked_worker", "a worker", "spec")
    try:
        assert worker.call({}, LIMIT_S) == {"blocked": [signal.SIGUSR1]}
    finally:
        worker.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_an_engine_never_gets_sigusr1(tmp_path: Path) -> None:
    server = ServerProcess({}, {}, tmp_path / "log")
    server.start()
    try:
        status = Path(f"/proc/{server.pid}/status").read_text()
    finally:
        server.stop()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert blocked == 1 << (signal.SIGUSR1 - 1)
