"""Faults in the files of a stopped run, and jobs that mrl must refuse or end."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from mrl.config import Recipe
from mrl.drill.chain import Drill, problems_of_end
from mrl.drill.faults import FAULTS, Row, fault
from mrl.drill.job import Unexpected, num_rows, saved
from mrl.errors import ExitCode
from parallel.checkpoint.manifest import candidates

BAD_REWARD = Path(__file__).with_name("bad_reward.py")


def stop(drill: Drill) -> None:
    """Make the running job save a checkpoint and stop.

    Raises Unexpected if the job's exit code is not SAVED.
    """
    job = drill.running()
    job.send(signal.SIGUSR1)
    if (code := job.end()) != ExitCode.SAVED:
        raise Unexpected(f"SIGUSR1 ended the run with code {code}; see {job.log}")


@fault("damaged-checkpoint", "one byte of the newest checkpoint flipped while the run is stopped")
def damaged_checkpoint(drill: Drill) -> Row:
    """Flip a bit of the newest checkpoint, and start the run again; return the fault's `Row`.

    The checkpoint's SHA-256 digests do not match, so the run must continue from an older
    checkpoint.
    """
    stop(drill)
    checkpoint = candidates(drill.run / "checkpoints")[0]
    file = max((f for f in checkpoint.iterdir() if f.is_file()), key=lambda f: f.stat().st_size)
    flip(file)
    return _continued(drill, "damaged-checkpoint", saved(drill.run))


@fault("cut-metrics", "all but the first line of metrics.jsonl removed while the run is stopped")
def cut_metrics(drill: Drill) -> Row:
    """Keep only the first line of metrics.jsonl, and start the run again; return the fault's `Row`.

    The start must restore the other lines from the copy in the checkpoint.
    """
    stop(drill)
    done = num_rows(drill.run)
    file = drill.run / "metrics.jsonl"
    file.write_bytes(file.read_bytes().split(b"\n")[0] + b"\n")
    return _continued(drill, "cut-metrics", done)


@fault("damaged-metrics", "a line of metrics.jsonl cut in half while the run is stopped")
def damaged_metrics(drill: Drill) -> Row:
    """Cut off half of a line of metrics.jsonl, and start the run again; return the fault's `Row`.

    The start must restore the line from the copy in the checkpoint.
    """
    stop(drill)
    done = num_rows(drill.run)
    file = drill.run / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[len(lines) // 2 - 1] = lines[len(lines) // 2 - 1][: len(lines[0]) // 2]
    file.write_bytes(b"\n".join(lines))
    return _continued(drill, "damaged-metrics", done)


@fault("other-recipe", "a start with another learning rate into the folder of the run")
def other_recipe(drill: Drill) -> Row:
    """Start the run again with another learning rate; return the fault's `Row`.

    The learning rate must not change during a run.

    The start must be refused with a message that names the recipe key.
    """
    if not num_rows(drill.run):
        drill.running()
    if drill.job is not None and drill.job.process.poll() is None:
        stop(drill)
    lr = 2 * drill.recipe.optimizer.lr or 1e-6
    return _refused(drill, "other-recipe", [f"optimizer.lr={lr}"], "optimizer.lr")


@fault("typo", "a key of the recipe misspelt")
def typo(drill: Drill) -> Row:
    """Start the run with a misspelt recipe key; return the fault's `Row`.

    The start must be refused with a message that names the correct key.
    """
    return _refused(drill, "typo", ["train.num_stepz=3"], "num_steps")


def _no_function(recipe: Recipe) -> str:
    if recipe.environment is not None:
        return "the recipe has an environment and no reward function"
    if recipe.debug.load_rollouts is not None:
        return "the recipe has no engine, so nothing is scored"
    return ""


@fault("reward-raises", "a reward function that raises", _no_function)
def reward_raises(drill: Drill) -> Row:
    """Start another run, whose reward function raises; return the fault's `Row`.

    The run must end, instead of training with rewards of 0.
    """
    return _bad_reward(drill, "reward-raises", "raises")


@fault("reward-hangs", "a reward function that hangs, with reward_timeout_s=5", _no_function)
def reward_hangs(drill: Drill) -> Row:
    """Start another run, whose reward function hangs; return the fault's `Row`.

    The worker that computes rewards must be killed at its time limit, and the run must end.
    """
    return _bad_reward(drill, "reward-hangs", "hangs", "reward_timeout_s=5")


def flip(file: Path, place: float = 0.5) -> None:
    """Flip one bit of a file, in the byte at `place`, which is a fraction of the file's length."""
    with file.open("r+b") as stream:
        at = int(place * (file.stat().st_size - 1))
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 16]))


def _continued(drill: Drill, name: str, done: int) -> Row:
    """Continue the run after its files were changed, and return the fault's `Row`.

    done: the number of steps that the run had done before the change.
    """
    began = time.monotonic()
    problems = drill.continued(done)
    assert drill.job is not None
    warnings = [line for line in drill.job.printed().splitlines() if "warning" in line.lower()]
    text = f"continued; {warnings[0].strip()}" if warnings else "continued"
    bits = ", the same bits as without the fault" if drill.judges_bits else ""
    seconds = time.monotonic() - began
    return Row(name, FAULTS[name].did, text + bits, seconds, "recovered", None, tuple(problems))


def _refused(drill: Drill, name: str, overrides: Sequence[str], named: str) -> Row:
    """Start a job with overrides that must be refused, and return the fault's `Row`.

    The text `named` must occur in a line that mrl prints.
    """
    began = time.monotonic()
    job = drill.start(*drill.words(*overrides))
    try:
        code = job.end()
        seconds = time.monotonic() - began
        problems = problems_of_end(job, code, (ExitCode.BAD_INPUT,))
    finally:
        job.kill()
    lines = [line for line in job.printed().splitlines() if line.startswith("mrl: ")]
    if not any(named in line for line in lines):
        problems.append(f"no line names {named}; see {job.log}")
    text = f"exit code {code}: {lines[0] if lines else 'no line'}"
    return Row(name, FAULTS[name].did, text, seconds, "refused", code, tuple(problems))


def _bad_reward(drill: Drill, name: str, function: str, *overrides: str) -> Row:
    """Start another run, whose reward function misbehaves; return the fault's `Row`.

    `function` is the function of `mrl.drill.bad_reward` to use as the reward.
    """
    if drill.job is not None and drill.job.process.poll() is None:
        stop(drill)  # only one start at a time can use the devices
    run = drill.folder / name
    began = time.monotonic()
    words = drill.words(f"reward={BAD_REWARD}:{function}", f"output_dir={run}", *overrides)
    job = drill.start(*words, run=run)
    try:
        while job.process.poll() is None and time.monotonic() < began + drill.limit_s:
            job.look()
            time.sleep(0.1)
        code = job.end(1.0)
        seconds = time.monotonic() - began
        problems = problems_of_end(job, code, (ExitCode.FAILED,))
    finally:
        job.kill()
    failure = job.failure()
    text = f"exit code {code}: {failure.what.splitlines()[0] if failure else 'no report'}"
    return Row(name, FAULTS[name].did, text, seconds, "refused", code, tuple(problems))
