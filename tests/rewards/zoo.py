"""Reward functions that misbehave, run by the real worker process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time


def lengths(prompts, completions, **columns):
    return [len(completion) for completion in completions]


async def slow_lengths(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [len(completion) for completion in completions]


def columns_seen(prompts, completions, *, answer, completion_ids, **columns):
    assert len(prompts) == len(completions) == len(answer)
    return [a + sum(ids) for a, ids in zip(answer, completion_ids, strict=True)]


def prints(prompts, completions, **columns):
    print('{"rewards": [1, 2, 3]}')
    sys.stdout.flush()
    os.write(1, b'{"rewards": [7]}\n')
    assert sys.stdin.read() == ""
    return [0.5] * len(completions)


def forks(prompts, completions, **columns):
    """The child comes back, too; it is slower, so that its line would answer the next call."""
    if not os.fork():
        time.sleep(0.05)
        return [7.0] * len(completions)
    return [len(completion) for completion in completions]


def forks_and_leaves(prompts, completions, **columns):
    """Become a daemon: the parent ends, and the child goes on as if it were the worker."""
    return _misbehave(completions, lambda: os._exit(0) if os.fork() else [7.0])


def writes_into_the_pipe(prompts, completions, **columns):
    """Write an answer into every file that is open for writing, as the reply pipe is."""

    def act():
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if int(name) > 2:
                    os.write(int(name), b'{"rewards": [7]}\n')
        return [1.0]

    return _misbehave(completions, act)


def _misbehave(completions, act):
    """`bad` is the culprit; the others get their length."""
    for completion in completions:
        if completion == "bad":
            return act()
    return [len(completion) for completion in completions]


def raises(prompts, completions, **columns):
    return _misbehave(completions, lambda: 1 / 0)


def hangs(prompts, completions, **columns):
    def loop():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass

    return _misbehave(completions, loop)


def hangs_with_child(prompts, completions, **columns):
    def loop():
        mark = os.environ["MRL_TEST_REWARD_CHILD"]
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)", mark])
        time.sleep(1e6)

    return _misbehave(completions, loop)


def dies(prompts, completions, **columns):
    return _misbehave(completions, lambda: os._exit(7))


def exits(prompts, completions, **columns):
    return _misbehave(completions, lambda: sys.exit(7))


def nan(prompts, completions, **columns):
    return [float("nan") if c == "bad" else len(c) for c in completions]


def infinite(prompts, completions, **columns):
    return [float("inf") if c == "bad" else len(c) for c in completions]


def text(prompts, completions, **columns):
    return ["1.0" if c == "bad" else len(c) for c in completions]


def too_few(prompts, completions, **columns):
    return [len(c) for c in completions if c != "bad"]


def nothing(prompts, completions, **columns):
    return _misbehave(completions, lambda: None)


def abstains(prompts, completions, **columns):
    return [None if c == "bad" else len(c) for c in completions]


def meets(prompts, completions, *, folder, **columns):
    """Returns once two processes are here at the same time."""
    open(f"{folder[0]}/{os.getpid()}", "w").close()
    while len(os.listdir(folder[0])) < 2:
        time.sleep(0.01)
    return [2.0] * len(completions)


def right(prompts, completions, *, answer, **columns):
    """Good: the only one of the following."""
    return [float(gold in text) for gold, text in zip(answer, completions, strict=True)]


def wrong_way_round(prompts, completions, *, answer, **columns):
    return [float(gold not in text) for gold, text in zip(answer, completions, strict=True)]


def counts_calls(prompts, completions, **columns):
    _CALLS.append(None)
    return [len(c) + 0.01 * len(_CALLS) for c in completions]


_CALLS: list[None] = []


def normalises(prompts, completions, **columns):
    lengths = [len(c) for c in completions]
    return [length / (1 + max(lengths)) for length in lengths]


def always_half(prompts, completions, **columns):
    return [0.5] * len(completions)


def silent(prompts, completions, **columns):
    return [None] * len(completions)


def of_the_prompt(prompts, completions, *, answer, **columns):
    """One value a row, another in each."""
    return [float(gold) for gold in answer]


def trl_form(completions, **kwargs):
    """TRL's: messages where the prompt is messages, by keyword, and the step."""
    assert len(kwargs["prompts"]) == len(completions)
    step = kwargs["trainer_state"].global_step
    return [len(c if isinstance(c, str) else c[0]["content"]) + 100 * step for c in completions]


def both_forms(prompts, completions, **kwargs):
    return [float(isinstance(completion, list)) for completion in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["split"] == "train"
    return {"score": float(solution_str == ground_truth), "acc": 1.0, "pred": solution_str}


async def custom_rm(args, sample, **kwargs):
    await asyncio.sleep(0.01)
    return float(sample.response == sample.label) + sample.response_length


def parts(prompts, completions, **columns):
    return [
        None
        if c == "none"
        else {"accuracy": float(c == "right"), "format": None if c == "bare" else 0.5}
        for c in completions
    ]


def with_total(prompts, completions, **columns):
    return [{"total": 0.25, "length": len(c)} for c in completions]


def bad_part(prompts, completions, **columns):
    return [{"a b": 1.0} if c == "bad" else {"a": 1.0} for c in completions]


def half(prompts, completions, **columns):
    return [None if c == "none" else 0.5 for c in completions]
