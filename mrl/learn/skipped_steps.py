"""Skip optimizer steps that would harm a model, and end a run after too many skipped steps in a row.

A step is skipped if something in it is not finite (`NonFiniteSteps`), or if a few tokens carry most
of its importance weight (`LowEssSteps`). A skipped step changes no weights, and the learning-rate
schedule does not advance; Megatron does the same if its loss scaler finds an infinity. All ranks
skip the same steps, because the guard of a step raises its error on all ranks or on none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from mrl.config import GuardConfig
from mrl.errors import NotFinite, RunFailed
from mrl.learn.guards import LowEss, UpdateGuard
from parallel.megatron_model import StepOutput


@dataclass
class NonFiniteSteps:
    """Takes the optimizer steps of one model, and skips those in which a log-prob, a value, a loss or
    a gradient is not finite."""

    model: str
    """The name of the model in messages."""
    limit: int
    """`guards.max_nonfinite_steps`: this many skipped steps in a row end the run."""
    warn: Callable[[str], None]
    in_a_row: int = 0
    num_skipped: int = field(default=0, init=False)
    """The number of steps skipped since `begin`."""

    def begin(self) -> None:
        """Reset `num_skipped` for another rollout. `in_a_row`, the number of skipped steps since the
        last step that was not skipped, keeps its value."""
        self.num_skipped = 0

    def take(self, step: int, train_step: Callable[[], StepOutput | None]) -> StepOutput | None:
        """Take an optimizer step by calling `train_step`, and return its output.

        Returns None if the step was not finite and is skipped, or if `train_step` returned None. Raises
        NotFinite for the last of `limit` non-finite steps in a row.
        """
        try:
            output = train_step()
        except NotFinite as error:
            text = str(error)  # the error itself would keep the activations alive
        else:
            self.in_a_row = 0
            return output
        self.in_a_row += 1
        self.num_skipped += 1
        if not text.startswith("step "):
            text = f"step {step}: {text}"
        key = f"guards.max_nonfinite_steps={self.limit}"
        if self.in_a_row >= self.limit:
            raise NotFinite(
                f"{text}; {self.in_a_row} optimizer step(s) of {self.model} in a row were not finite "
                f"and changed nothing ({key}): look at these samples, lower the learning rate, or try "
                "model.dtype=float32"
            )
        self.warn(
            f"{text}; this optimizer step of {self.model} is skipped and changes nothing, "
            f"{self.in_a_row} in a row ({key} ends the run)"
        )
        return None


@dataclass
class LowEssSteps:
    """Takes the policy's optimizer steps, and skips those whose effective sample size is too low.

    The limit is `guards.min_ess`. While steps are skipped, the trainer's weights do not change, so
    the weights that sample later rollouts become less stale.
    """

    config: GuardConfig
    warn: Callable[[str], None]
    in_a_row: int = 0
    _num_skipped: int = field(default=0, init=False)
    _lowest: float = field(default=math.inf, init=False)
    """The lowest effective sample size since `begin`, including skipped steps; inf before the first
    step."""

    def begin(self) -> None:
        """Reset the metrics for another rollout. `in_a_row`, the number of skipped steps since the last
        step that was not skipped, keeps its value."""
        self._num_skipped, self._lowest = 0, math.inf

    def metrics(self) -> dict[str, float]:
        """Return the metrics `guard/ess` (the lowest since `begin`) and `train/low_ess_steps`.

        Returns {} without `guards.min_ess`. `guard/ess` is missing if no effective sample size was
        measured since `begin`.
        """
        if self.config.min_ess is None:
            return {}
        counts = {"train/low_ess_steps": float(self._num_skipped)}
        return counts | ({"guard/ess": self._lowest} if self._lowest < math.inf else {})

    def take(
        self, step: int, guard: UpdateGuard, train_step: Callable[[], StepOutput]
    ) -> StepOutput | None:
        """Take an optimizer step under `guard` and return its output; None if the step was skipped.

        Raises RunFailed for the last of `guards.max_low_ess_steps` skipped steps in a row.
        """
        try:
            output = train_step()
        except LowEss:
            pass  # the error itself would keep the activations alive
        else:
            self.in_a_row = 0
            if guard.ess is not None:
                self._lowest = min(self._lowest, guard.ess)
            return output
        assert guard.ess is not None
        self._lowest = min(self._lowest, guard.ess)
        self.in_a_row += 1
        self._num_skipped += 1
        text = (
            f"step {step}: the effective sample size of the importance weights is {guard.ess:.3g} of "
            f"the loss tokens, below guards.min_ess={self.config.min_ess:g}"
        )
        key = f"guards.max_low_ess_steps={self.config.max_low_ess_steps}"
        if self.in_a_row >= self.config.max_low_ess_steps:
            raise RunFailed(
                f"{text}; {self.in_a_row} optimizer step(s) in a row were below it and changed nothing "
                f"({key}); lower async.max_staleness or the learning rate, or look for a gap between "
                "engine and trainer with `mrl why`"
            )
        self.warn(
            f"{text}; this optimizer step is skipped and changes nothing, {self.in_a_row} in a row "
            f"({key} ends the run)"
        )
        return None
