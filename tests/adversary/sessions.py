"""Three clients of one service, one of them hostile: nobody else's bits may change.

    python -m tests.adversary.sessions --operations 1000 --seed 0

Two honest clients (`honest.py`) and a hostile one (`hostile.py`) share a real service with the real
engine. Then the honest ones, with the same seeds, have a service to themselves. Each of their results
and their last checkpoints must be the same bits; each operation must end; the service must still run
and end by itself when told; and no request may have cost an engine. Prints each problem and one line,
`N passed, N failed`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mrl.client import ServiceClient
from mrl.toy_model import write_toy_model
from tests.adversary.honest import Honest
from tests.adversary.hostile import Hostile
from tests.tenants.serving import Service, wait_for

HONEST = ("ann", "bob")
HOSTILE_SHARE = 0.6
"""Share of all operations; each honest client has half of the rest."""
LOST = "starting another one"
"""What the service prints when it lost an engine."""
END_S = 180.0


@dataclass
class Verdict:
    """What was looked at, and what was wrong with it."""

    num_passed: int = 0
    failures: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    def check(self, holds: bool, otherwise: str) -> None:
        if holds:
            self.num_passed += 1
        else:
            self.failures.append(otherwise)

    def line(self) -> str:
        return f"{self.num_passed} passed, {len(self.failures)} failed"


def run(folder: Path, num_operations: int, seed: int) -> Verdict:
    """Run both services one after the other in `folder`, and compare."""
    verdict = Verdict()
    write_toy_model(folder / "model")
    num_hostile = round(num_operations * HOSTILE_SHARE)
    num_honest = (num_operations - num_hostile) // len(HONEST)
    beside = _serve(folder / "beside", folder / "model", seed, num_honest, num_hostile, verdict)
    alone = _serve(folder / "alone", folder / "model", seed, num_honest, 0, verdict)
    for name in HONEST:
        ours, theirs = beside[name], alone[name]
        verdict.check(len(ours) == len(theirs), f"{name}: {len(ours)} results, not {len(theirs)}")
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            verdict.check(mine == other, f"{name}, operation {number}: {mine!r}, alone {other!r}")
    return verdict


def _serve(
    folder: Path, model: Path, seed: int, num_honest: int, num_hostile: int, verdict: Verdict
) -> dict[str, list[str]]:
    """Run a service with its clients; return the results of the honest ones."""
    service = Service(folder, model)
    service.write()
    process = service.start()
    try:
        wait_for((folder / "control.sock").exists, process)
        client = ServiceClient(folder)
        honest = [Honest(client, name, service.run_of(name), seed, num_honest) for name in HONEST]
        hostile = Hostile(client, "eve", folder, seed, num_hostile)
        if num_hostile:
            hostile.create()
        began = time.monotonic()
        for problem in _together([each.run for each in (*honest, hostile)]):
            verdict.check(False, f"{folder.name}: {problem}")
        seconds = time.monotonic() - began
        verdict.check(process.poll() is None, f"{folder.name}: the service ended")
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(END_S)
    verdict.check(code in (0, 75), f"{folder.name}: the service ended with {code}")
    log = folder.with_suffix(".log").read_text(errors="replace")
    verdict.check(LOST not in log, f"{folder.name}: {log.count(LOST)} engines lost by requests")
    verdict.check("Traceback" not in log, f"{folder.name}: a traceback in {folder}.log")
    for body in hostile.silent:
        verdict.check(False, f"no answer to {str(body)[:300]}")
    for problem in hostile.problems:
        verdict.check(False, f"the service failed: {problem}")
    verdict.num_passed += (
        sum(hostile.came_to.values()) - len(hostile.silent) - len(hostile.problems)
    )
    verdict.facts.append(f"{folder.name}: {seconds:.0f} s, hostile {dict(hostile.came_to)}")
    return {each.name: each.results for each in honest}


def _together(calls: Sequence[Callable[[], None]]) -> list[str]:
    """Call all in threads of their own; return what they raised."""
    problems: list[str] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            problems.append(f"{call.__qualname__}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1000, help="of all three clients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the services' folders here")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        verdict = run(folder, given.operations, given.seed)
    for text in (*verdict.facts, *verdict.failures):
        print(text)
    print(verdict.line())
    return int(bool(verdict.failures))


if __name__ == "__main__":
    sys.exit(main())
