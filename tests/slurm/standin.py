"""Stands in for torchrun and `mrl train` in the rows that try train.sbatch on a real SLURM in seconds.

As with the real ones, a SIGUSR1 kills the launcher, unless it was started ignoring it; its rank is a
child in a session of its own, which knows what to do with the signal only after its imports, and then
leaves at the end of a step with 75; a rank does not live on without its engine. `OUTPUT_DIR/plan.json`
says how long each start imports, and after how many steps it ends with which code, or waits for what
befalls it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NUM_STEPS = 8
STEP_S = 0.25
LOST_AFTER_S = 4.0
"""A rank takes another one for lost that has not been heard of for so long."""


def launch(arguments: list[str]) -> None:
    """Be torchrun: start the rank of this node, end with its code."""
    command = [sys.executable, __file__, "--rank", *arguments]
    env = {**os.environ, "RANK": os.environ["SLURM_PROCID"]}
    with subprocess.Popen(command, env=env, start_new_session=True) as rank:
        signal.signal(signal.SIGTERM, lambda *_: (rank.kill(), sys.exit(143)))
        code = rank.wait()
    sys.exit(code if code >= 0 else 71)  # as mrl.launch reports a rank that was killed


def train(arguments: list[str]) -> None:
    """Be the one rank of this node."""
    out = Path(next(word for word in arguments if word.startswith("output_dir=")).partition("=")[2])
    world = int(arguments[arguments.index("--nnodes") + 1])
    rank = int(os.environ["RANK"])
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    (out / f"words_{rank}").write_text(" ".join(arguments))
    plans = json.loads((out / "plan.json").read_text())
    plan = plans[min(start, len(plans) - 1)]
    note(out, rank, start, f"starts, GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}")
    note(out, rank, start, f"is on {os.environ['SLURMD_NODENAME']}")
    time.sleep(plan.get("import_s", 0.2))
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # as mrl starts its engines
    engine = subprocess.Popen(["sleep", "600"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    latest = out / "checkpoints/latest_checkpointed_iteration.txt"
    latest.parent.mkdir(exist_ok=True)
    step = int(latest.read_text()) if latest.exists() else 0
    num_done = 0
    while step < NUM_STEPS:
        if num_done == plan.get("steps", 1000):
            note(out, rank, start, "ends")
            code = plan.get("codes", [plan.get("code", 1)] * world)[rank]
            report(out, code, waits=max(plan.get("codes", [1])) > 1)
            end(engine, code)
        if asked:
            note(out, rank, start, "leaves")
            end(engine, 75)
        if engine.poll() is not None:
            note(out, rank, start, f"lost its engine: {engine.returncode}")
            end(engine, 73)
        time.sleep(STEP_S)
        check_others(out, start, rank, world, engine)
        if num_done == plan.get("hold_after"):
            continue
        step, num_done = step + 1, num_done + 1
        if rank == 0:
            new = latest.with_suffix(".new")  # as mrl writes it: a kill leaves the old one or this
            new.write_text(f"{step}\n")
            new.replace(latest)
            with (out / "metrics.jsonl").open("a") as file:  # by which a service has come further
                file.write("{}\n")
    note(out, rank, start, "done")
    end(engine, 0)


def check_others(out: Path, start: int, rank: int, world: int, engine: subprocess.Popen) -> None:
    """End with the code of a lost rank where another one is no longer heard of."""
    (out / f"alive_{start}_{rank}").touch()
    for other in range(world):
        file = out / f"alive_{start}_{other}"
        if file.exists() and time.time() - file.stat().st_mtime > LOST_AFTER_S:
            note(out, rank, start, f"lost rank {other}")
            end(engine, 71)


def report(out: Path, code: int, *, waits: bool) -> None:
    """Write RUN/failure.json as mrl does; a rank that ends with 1 ends because of the other's fault."""
    file = out / "failure.json"
    if code in (70, 72, 74, 76, 77):
        file.write_text(json.dumps({"what": "a fault", "exit_code": code}, indent=2) + "\n")
    deadline = time.monotonic() + 30
    while code == 1 and waits and not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def end(engine: subprocess.Popen, code: int) -> None:
    engine.kill()
    if code == -9:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(code)


def note(out: Path, rank: int, start: int, what: str) -> None:
    with (out / "notes").open("a") as file:
        file.write(f"start {start} rank {rank}: {what}\n")


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        train(sys.argv[2:])
    else:
        launch(sys.argv[1:])
