"""Predict, for each placement, how long a step takes and which role waits for the other.

The predictions are computed from the times of the parts of a step.

Legend: g = `generate_s`; t = `train_s`; c = `sync_s`; l = `load_s`; r = `spread`; n = `max_staleness`.
All times are means over steps. If steps differ in length, a real run is slower than predicted, because
the mean of max(x, y) over steps is at least max(mean of x, mean of y).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrl.errors import InputError

Placement = Literal["colocated", "synchronous", "asynchronous"]
"""`colocated`: all devices take turns at training and generating. `synchronous`: engines have
devices of their own, and the two roles take turns (`async.max_staleness: 0`). `asynchronous`: both
roles work at the same time."""
Side = Literal["trainer", "rollout", "neither"]


@dataclass(frozen=True)
class StepTimes:
    """Seconds that each part of a step takes if nothing else runs on the devices that it uses."""

    generate_s: float
    """Seconds from the first request to the end of the slowest group of the step's batch."""
    train_s: float
    """Seconds of the trainer's work other than the weight sync, such as log-probs and updates."""
    sync_s: float
    """Seconds of the trainer's part of a weight sync: the export, and the copy to the engines or their
    hosts."""
    load_s: float = 0.0
    """Seconds of the engine's part of a weight sync, in which it loads the weights from host memory and
    generates nothing. 0 if `sync_s` includes it, as in a colocated run."""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not 0 <= seconds < float("inf"):
                raise InputError(f"StepTimes.{name}: got {seconds}, expected seconds of 0 or more")

    @property
    def total_s(self) -> float:
        """Seconds of a step in which the parts run one after the other."""
        return self.sync_s + self.load_s + self.generate_s + self.train_s

    def scaled(self, *, generate: float = 1.0, train: float = 1.0) -> StepTimes:
        """Return the times with `generate_s` divided by `generate`, and `train_s` divided by `train`.

        More devices have this effect only approximately: more engines do not speed up the longest
        response.
        """
        return StepTimes(self.generate_s / generate, self.train_s / train, self.sync_s, self.load_s)


@dataclass(frozen=True)
class ExpectedStep:
    """The predicted time of a step. A role's busy and idle seconds add up to `step_s`."""

    step_s: float
    trainer_idle_s: float
    """Seconds in which the trainer's devices are idle; 0 in a colocated run, because the roles share
    their devices."""
    rollout_idle_s: float
    """Seconds in which the engines' devices are idle; 0 in a colocated run."""
    tail_s: float
    """Seconds in which the engines generate less than a full batch, because the end of the step or
    the load of newer weights waits for the slowest groups."""

    @property
    def trainer_idle(self) -> float:
        """Share of the step in which the trainer is idle, 0 to 1."""
        return self.trainer_idle_s / self.step_s if self.step_s else 0.0

    @property
    def rollout_idle(self) -> float:
        """Share of the step in which the engines are idle, 0 to 1."""
        return self.rollout_idle_s / self.step_s if self.step_s else 0.0

    @property
    def waits(self) -> Side:
        """The role that is idle for longer, or `neither` if both are idle equally long."""
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
    """Return the predicted seconds of a step, and the seconds in which each role is idle.

    `spread` (r >= 1) is the time to generate a step's batch, divided by the time that engines would
    need if they were always full. If decoding is bound by memory bandwidth, a group is as fast in a
    batch as alone, and r is the time of the slowest group divided by the mean time of the groups.

    The letters are explained in the module docstring.

    - colocated, synchronous: c + l + g + t, because the roles take turns.
    - asynchronous: max(t + c, b + l), where b is the result of `generation_s`. With a fixed schedule
      (`deterministic`) b is g, because a batch is generated only after the previous one is complete.
      If in addition n = 1, the step takes c + max(t, g + l), because the engine has no work while it
      receives the weights.

    Raises InputError if `spread` is below 1, or if `max_staleness` does not suit the placement: it must
    be at least 1 for `asynchronous`, and 0 for `colocated` and `synchronous`.
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
    busy_s = times.generate_s
    if not deterministic:
        busy_s = generation_s(busy_s, spread, max_staleness, in_flight_updates)
    trainer_s, engine_s = times.train_s + times.sync_s, busy_s + times.load_s
    step_s = max(trainer_s, engine_s)
    if deterministic and max_staleness == 1:
        step_s = times.sync_s + max(times.train_s, engine_s)
    return ExpectedStep(step_s, step_s - trainer_s, step_s - engine_s, busy_s - full_s)


def generation_s(
    generate_s: float, spread: float, max_staleness: int, in_flight_updates: str
) -> float:
    """Return the seconds that engines need to generate one step's batch while the trainer trains.

    - `finish`: g / r + (g - g / r) / n. The engine is full except before it loads newer weights, when
      it waits for its slowest group. At best this happens once in n steps.
    - `interrupt`: max(g / r, g / n). The engine does not finish its groups before it loads newer
      weights, so it is always full. But no group may take longer than n steps, because later steps
      must not train on it.

    For n = 1 both formulas give g, because then only the groups of one step are in flight.
    """
    full_s = generate_s / spread
    if in_flight_updates == "interrupt":
        return max(full_s, generate_s / max_staleness)
    return full_s + (generate_s - full_s) / max_staleness
