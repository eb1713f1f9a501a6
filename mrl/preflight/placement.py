"""This module predicts how long a step takes in each placement, and who waits, from its parts.

Legend: g = `generate_s`; t = `train_s`; c = `sync_s`; l = `load_s`; r = `spread`; n = `max_staleness`.
All are means over steps. Steps that differ from each other make a real run slower than this: the mean
of the slower side is never less than the slower side of the means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrl.errors import InputError

Placement = Literal["colocated", "synchronous", "asynchronous"]
"""`colocated`: all devices train and generate in turns. `synchronous`: engines have devices of their
own, and the roles take turns (`async.max_staleness: 0`). `asynchronous`: they work at one time."""
Side = Literal["trainer", "rollout", "neither"]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step's parts, each alone on the devices that the placement gives to it."""

    generate_s: float
    """Seconds from the first request to the end of the slowest group of the step's batch."""
    train_s: float
    """All that the trainer does beside sending weights: log-probs, updates, records."""
    sync_s: float
    """The trainer's part of a weight sync: the export, and the copy to the engines or their hosts."""
    load_s: float = 0.0
    """The engine's part, in which it generates nothing: it takes the weights from its host's memory.
    0 where `sync_s` includes it, as in a colocated run."""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not 0 <= seconds < float("inf"):
                raise InputError(f"StepTimes.{name}: got {seconds}, expected seconds of 0 or more")

    @property
    def total_s(self) -> float:
        """The step where the parts take turns."""
        return self.sync_s + self.load_s + self.generate_s + self.train_s

    def scaled(self, *, generate: float = 1.0, train: float = 1.0) -> StepTimes:
        """Return the times where generation is `generate` times and training `train` times as fast, as
        on more devices. The longest answer alone seldom gains from more engines."""
        return StepTimes(self.generate_s / generate, self.train_s / train, self.sync_s, self.load_s)


@dataclass(frozen=True)
class ExpectedStep:
    """What a step comes to. The seconds of either role and its idle seconds add up to `step_s`."""

    step_s: float
    trainer_idle_s: float
    """The trainer's devices have nothing to do. 0 in a colocated run, where no device has one role."""
    rollout_idle_s: float
    """The engines' devices have nothing to do. 0 in a colocated run."""
    tail_s: float
    """Engines work, but some of their places are empty, because the step, or the next weights, wait
    for the slowest groups."""

    @property
    def trainer_idle(self) -> float:
        """Share of the step in which the trainer waits, 0 to 1."""
        return self.trainer_idle_s / self.step_s if self.step_s else 0.0

    @property
    def rollout_idle(self) -> float:
        """Share of the step in which the engines wait, 0 to 1."""
        return self.rollout_idle_s / self.step_s if self.step_s else 0.0

    @property
    def waits(self) -> Side:
        """The side that waits longer."""
        if self.trainer_idle_s == self.rollout_idle_s:
            return "neither"
        return "trainer" if self.trainer_idle_s > self.rollout_idle_s else "rollout"


def expected_step_s(
    times: StepTimes,
    placement: Placement,
    max_staleness: int = 0,
    *,
    spread: float = 1.0,
    in_flight_updates: Literal["finish", "interrupt"] = "finish",
    deterministic: bool = False,
) -> ExpectedStep:
    """Return the seconds of a step and of each role's idleness.

    `spread` (r >= 1): the seconds of a step's batch, over those that it takes in engines that are
    always full. Where decoding is bound by memory bandwidth, so that a group takes as long beside
    others as alone, it is the slowest group's seconds over the mean group's.

    - colocated, synchronous: c + l + g + t; the roles take turns.
    - asynchronous: max(t + c, b + l), where b is what `generation_s` returns. By a fixed schedule with
      n = 1 the engine has no work while it gets the weights: c + max(t, g + l).

    Raises InputError where a bound is missing, or is given to a placement without one.
    """
    if spread < 1:
        raise InputError(f"spread: got {spread}, expected 1 (all groups take equally long) or more")
    if (max_staleness >= 1) != (placement == "asynchronous"):
        expected = "at least 1" if placement == "asynchronous" else "0"
        raise InputError(f"max_staleness: got {max_staleness}, expected {expected} for {placement}")
    full_s = times.generate_s / spread
    if placement != "asynchronous":
        tail_s, turns = times.generate_s - full_s, placement == "synchronous"
        engine_s, trainer_s = times.generate_s + times.load_s, times.train_s + times.sync_s
        return ExpectedStep(times.total_s, engine_s * turns, trainer_s * turns, tail_s)
    busy_s = generation_s(
        times.generate_s,
        max_staleness,
        spread=spread,
        in_flight_updates=in_flight_updates,
        deterministic=deterministic,
    )
    trainer_s, engine_s = times.train_s + times.sync_s, busy_s + times.load_s
    step_s = max(trainer_s, engine_s)
    if deterministic and max_staleness == 1:
        step_s = times.sync_s + max(times.train_s, engine_s)
    return ExpectedStep(step_s, step_s - trainer_s, step_s - engine_s, busy_s - full_s)


def generation_s(
    generate_s: float,
    max_staleness: int,
    *,
    spread: float = 1.0,
    in_flight_updates: Literal["finish", "interrupt"] = "finish",
    deterministic: bool = False,
) -> float:
    """Return the seconds in which engines that work beside the trainer generate one step's groups.

    - by a fixed schedule: g. Batches are generated whole, one after the other.
    - `finish`: g / r + (g - g / r) / n. An engine is full but for the end before it takes newer
      weights; then it waits for its slowest group. At best it does so once in n steps.
    - `interrupt`: max(g / r, g / n). Nothing is emptied for newer weights, and the engine is as fast as
      a full one, unless the slowest group, begun with new weights, is not done n steps later, when
      the step that must train on it begins.

    All three are g for n = 1: then a step trains on groups of the version before it, and these are all
    that is in flight.
    """
    if deterministic:
        return generate_s
    full_s = generate_s / spread
    if in_flight_updates == "interrupt":
        return max(full_s, generate_s / max_staleness)
    return full_s + (generate_s - full_s) / max_staleness
