"""A game for verifiers 0.4: the policy guesses a letter, is shown the right one, and guesses again.

See docs/environments_elsewhere.md. `load()` yields one task per letter and round; `run()` plays it.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessLetters", "GuessLettersEnv"]


class LetterData(vf.TaskData):
    letter: str


class LetterTask(vf.Task[LetterData]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        """The share of the right letter in each guess, as a mean over the guesses."""
        guesses = [said.content or "" for said in trace.assistant_messages]
        found = [guess.count(self.data.letter) / len(guess) if guess else 0.0 for guess in guesses]
        return sum(found) / len(found) if found else 0.0

    @vf.metric
    async def num_guesses(self, trace: vf.Trace) -> float:
        return len(trace.assistant_messages)


class LettersConfig(vf.TasksetConfig):
    letters: str = "abcdefgh"
    rounds: int = 4
    """Tasks of each letter."""
    prompt: str = "guess"


class GuessLetters(vf.Taskset[LetterTask, LettersConfig]):
    def load(self) -> Iterator[LetterTask]:
        for _ in range(self.config.rounds):
            for letter in self.config.letters:
                yield LetterTask(
                    LetterData(prompt=self.config.prompt, letter=letter), self.config.task
                )


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    turns: int = 3
    repeats: int = 4
    """How often the answer repeats the right letter."""


class GuessLettersEnv(vf.Env[GuessConfig]):
    async def run(self, task: LetterTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(self.config.turns - 1):
                if not segment.terminated:
                    segment = await talk.turn(task.data.letter * self.config.repeats)
