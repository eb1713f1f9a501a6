"""Environments that misbehave, run by the real worker process."""

import asyncio
import os
import random
import sys
import time
from contextlib import suppress

from mrl.environments import StepResult


class Echo:
    """Says what it was told, three times; `done` ends it, and so do the misdeeds below."""

    def __init__(self, factor=1.0):
        self.factor, self.steps, self.seed = factor, 0, None

    def reset(self, prompt, seed, **columns):
        self.seed = seed
        return f"{prompt} {seed} {columns}" if columns else None

    def step(self, action):
        self.steps += 1
        print("noise on stdout")
        if action == "bad":
            return self.misbehave()
        return StepResult(f"{self.steps}:{action}", self.factor, done=action == "done")

    def misbehave(self):
        raise KeyError("bad")


class Halves(Echo):
    """Answers with half of a surrogate pair, as json.loads of what a policy wrote may hold."""

    def misbehave(self):
        return StepResult("\ud83d")


class Unprintable(Echo):
    def misbehave(self):
        raise ValueError("got \ud83d")


class Textless(Echo):
    def misbehave(self):
        class Error(Exception):
            def __str__(self):
                raise KeyError

        raise Error


class Raises(Echo):
    pass


class Forks(Echo):
    def step(self, action):
        if not os.fork():
            time.sleep(0.05)
            return StepResult("of the child", 7.0)
        return super().step(action)


class Exits(Echo):
    def misbehave(self):
        sys.exit(7)


class Dies(Echo):
    def misbehave(self):
        os._exit(7)


class Hangs(Echo):
    def misbehave(self):
        while True:
            time.sleep(1)


class Nonsense(Echo):
    def misbehave(self):
        return "nonsense"


class Huge(Echo):
    """Says more than the trainer reads; tests lower the limit."""

    def misbehave(self):
        return StepResult("x" * 100_000, 1.0)


class SpeaksOutOfTurn(Echo):
    """Writes past its worker into the pipe, which is no answer."""

    def misbehave(self):
        for fd in range(3, 10):
            with suppress(OSError):
                os.write(fd, b"no json\n")
        return StepResult("x", 1.0)


class Nan(Echo):
    def misbehave(self):
        return StepResult("x", float("nan"))


class Silent(Echo):
    def misbehave(self):
        return StepResult(None, 1.0)


class Roleless(Echo):
    def misbehave(self):
        return StepResult([{"content": "x"}], 1.0)


class Forgetful(Hangs):
    """Its answers do not follow from the seed."""

    def step(self, action):
        result = super().step(action)
        return StepResult(f"{result.observation} {random.random()}", 0.0)


class FailsSecond(Echo):
    def step(self, action):
        return self.misbehave() if self.steps else super().step(action)


class Shouts(Echo):
    def reset(self, prompt, seed, **columns):
        return "x" * 1000


class Later(Echo):
    async def step(self, action):
        await asyncio.sleep(0.001)
        return StepResult(action, 1.0)


class Closes(Echo):
    """Leaves a file for each episode that was closed."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def close(self):
        if self.seed is not None:
            with open(f"{self.folder}/{self.seed}", "a") as file:
                file.write("closed")


class ClosesBadly(Closes):
    """Its close() raises where the seed is odd."""

    def close(self):
        super().close()
        if self.seed is not None and self.seed % 2:
            sys.exit("no, not closed")


class ClosesSlowly(Closes):
    async def close(self):
        await asyncio.sleep(0.2)
        super().close()


class Unsendable(Closes):
    def misbehave(self):
        return StepResult([{"role": "tool", "content": "x", "set": {1}}])


class SpeaksInMessages(Closes):
    """Which a prompt that is a string has no place for."""

    def step(self, action):
        return StepResult([{"role": "tool", "content": "x"}])


class ForgetfulCloses(Forgetful):
    """Played again, it answers otherwise: the process has it still, the runner has not."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    close = Closes.close


def search(messages, **columns):
    """Gives openai_chat a tool that looks a word up, and a user who wants the answer."""
    turn = messages[-1]
    if calls := turn.get("tool_calls"):
        said = [{"role": "tool", "content": str(calls)}]
        return said, 0.0, False
    return [{"role": "user", "content": f"{len(messages)} messages"}], float(columns["n"]), False


class Talker:
    """Begins the conversation of openai_chat, and ends it at once."""

    def __init__(self, word):
        self.word = word

    def reset(self, messages, seed, **columns):
        return [{"role": "user", "content": f"{self.word}{len(messages)}"}]

    async def __call__(self, messages, **columns):
        return [], 1.0, True


class NoStep:
    def reset(self, prompt, seed, **columns):
        return None


constant = 3
