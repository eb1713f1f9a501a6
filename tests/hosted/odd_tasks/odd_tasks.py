"""Tasks for verifiers whose `kind` says what they do: some of them nothing good."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["OddTasks"]


class OddData(vf.TaskData):
    kind: str


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class OddConfig(vf.TaskConfig):
    with_tools: bool = False


class OddTask(vf.Task[OddData, vf.State, OddConfig]):
    @classmethod
    def toolsets(cls, config: OddConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())] if config.with_tools else []

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        kind = self.data.kind
        if kind == "breaks":
            raise RuntimeError("on purpose")
        if kind == "hangs":
            await asyncio.sleep(600)
        if kind == "blocks":
            time.sleep(600)
        if kind == "dies":
            os._exit(7)

    @vf.reward(weight=2.0)
    async def length(self, trace: vf.Trace) -> float:
        if self.data.kind == "misjudges":
            raise ValueError("no reward")
        return len(trace.assistant_messages[-1].content or "")

    @vf.reward
    async def bonus(self, trace: vf.Trace) -> float:
        return float("nan") if self.data.kind == "lies" else 0.5

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return len(trace.assistant_messages)


class OddTasksConfig(vf.TasksetConfig):
    task: OddConfig = OddConfig()
    kinds: tuple[str, ...] = ("good",)
    endless: bool = False
    split: str = "train"


class OddTasks(vf.Taskset[OddTask, OddTasksConfig]):
    INFINITE = False

    def __init__(self, config: OddTasksConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self) -> Iterator[OddTask]:
        for kind in self.config.kinds:
            data = OddData(prompt=f"{kind} {self.config.split}", system_prompt="odd", kind=kind)
            yield OddTask(data, self.config.task)
        while self.config.endless:
            yield OddTask(OddData(prompt=[vf.UserMessage(content="more")], kind="good"))


if __name__ == "__main__":
    Adder.run()
