"""Environments that wait in a step, run by the real worker process."""

import asyncio
import os
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
