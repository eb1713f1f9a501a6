"""An environment that says as many letters as its prompt's column `letters`, and is done after `turns`
turns."""

from mrl.environments.base import StepResult


class Environment:
    def __init__(self):
        self.left, self.letters = 0, 0

    def reset(self, prompt, seed, *, letters, turns):
        self.left, self.letters = turns, letters

    def step(self, action):
        letters, self.letters, self.left = self.letters, 1, self.left - 1
        return StepResult("x" * letters, 0.5, done=not self.left)
