"""Environments that wait in a step, run by the real worker process."""

import asyncio
import os
import random
import time

from mrl.environments import StepResult
from tests.environments.zoo import Closes, Echo


class Together(Echo):
    """Answers when `num` episodes of this process are in a step."""

    arrived = 0
    all_there = asyncio.Event()

    def __init__(self, num):
        super().__init__()
        self.num = num

    async def step(self, action):
        Together.arrived += 1
        if Together.arrived == self.num:
            Together.all_there.set()
        await Together.all_there.wait()
        return super().step(action)


class Mixed(Closes):
    """What an action makes of an `async` step."""

    async def step(self, action):
        result = super().step(action if action != "bad" else "")
        if action == "waits":
            await asyncio.sleep(3600)
        elif action == "naps":
            await asyncio.sleep(0.5)
        elif action == "insists":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    break
            await asyncio.sleep(0.3)
        elif action == "bad":  # blocks the others
            time.sleep(3600)
        elif action == "dies":
            await asyncio.sleep(0.1)
            os._exit(7)
        elif action == "exits":
            await asyncio.create_task(self.exits())
        return result

    async def exits(self):
        raise SystemExit(7)


class Naps(Echo):
    """A step that is not `async`, and takes a moment."""

    def step(self, action):
        time.sleep(float(action))
        return StepResult(action, 1.0)


class OwnLoop(Echo):
    """Runs an event loop of its own in a step."""

    def step(self, action):
        async def said():
            await asyncio.sleep(0)
            return super(OwnLoop, self).step(action)

        return asyncio.run(said())


class ClosesNever(Closes):
    def close(self):
        if self.seed == 1:
            time.sleep(3600)
        super().close()


class Which(Echo):
    """Says which process it is in."""

    def step(self, action):
        return StepResult(str(os.getpid()), 1.0)


class Waits(Echo):
    """Waits in its step, or in its reset, for a file that the row names. Its rewards are 1, 2, 3."""

    def __init__(self, turns=3):
        super().__init__()
        self.turns, self.file, self.at = turns, None, None

    async def reset(self, prompt, seed, file=None, at="step", **columns):
        super().reset(prompt, seed)
        self.file, self.at = file, at
        await self.wait("reset")

    async def step(self, action):
        self.steps += 1
        await self.wait("step")
        return StepResult(f"{self.seed % 100}:{action}", self.steps, done=self.steps == self.turns)

    async def wait(self, at):
        while self.file is not None and at == self.at and not os.path.exists(self.file):
            await asyncio.sleep(0.01)


class Delays(Waits):
    """Takes random times, which its answers do not depend on."""

    async def wait(self, at):
        await asyncio.sleep(random.random() * 0.05)
        if random.random() < 0.3:
            time.sleep(random.random() * 0.01)


class Fails(Waits):
    """Fails in its second step if its row says so."""

    async def step(self, action):
        if self.steps and self.at == "fails":
            raise ValueError("on purpose")
        return await super().step(action)


class Dies(Echo):
    async def step(self, action):
        await asyncio.sleep(0.05)
        if action == "dies":
            os._exit(7)
        return super().step(action)


class Rich:
    """Two steps, each with a reward that float32 holds."""

    def reset(self, prompt, seed, reward=3e38):
        self.reward, self.steps = reward, 0

    def step(self, action):
        self.steps += 1
        return StepResult("more", self.reward, done=self.steps == 2)
