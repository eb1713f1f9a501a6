"""Counts the optimizer steps that were skipped because their importance weights rest on too few tokens.

A skipped step changes no weights, so that the next rollouts are closer to the trainer again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from mrl.config import GuardConfig
from mrl.errors import RunFailed
from mrl.learn.guards import LowEss, UpdateGuard
from parallel.megatron_model import StepOutput


@dataclass
class LowEssSteps:
    """`LowEssSteps` takes the policy's optimizer steps, and skips those below `guards.min_ess`.

    All ranks see the same, as a step raises LowEss on all of them or on none.
    """

    config: GuardConfig
    warn: Callable[[str], None]
    in_a_row: int = 0
    _num_skipped: int = field(default=0, init=False)
    _lowest: float = field(default=math.inf, init=False)
    """That of the worst step since `begin`."""

    def begin(self) -> None:
        """Begin with another rollout; `in_a_row` stays."""
        self._num_skipped, self._lowest = 0, math.inf

    def metrics(self) -> dict[str, float]:
        """Return `guard/ess` and `train/low_ess_steps` since `begin`; nothing where none is judged."""
        if self.config.min_ess is None:
            return {}
        counts = {"train/low_ess_steps": float(self._num_skipped)}
        return counts | ({"guard/ess": self._lowest} if self._lowest < math.inf else {})

    def take(
        self, step: int, guard: UpdateGuard, train_step: Callable[[], StepOutput]
    ) -> StepOutput | None:
        """Return what an optimizer step under `guard` gave; None where it was skipped.

        Raises RunFailed where it is the last of `guards.max_low_ess_steps` in a row.
        """
        try:
            return self._took(guard, train_step())
        except LowEss:
            pass  # the error itself would keep the activations
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
                f"{text}; {self.in_a_row} optimizer step(s) in a row had less and changed nothing "
                f"({key}); lower async.max_staleness or the learning rate, or look for a gap between "
                "engine and trainer with `mrl why`"
            )
        self.warn(
            f"{text}; this optimizer step is skipped and changes nothing, {self.in_a_row} in a row "
            f"({key} ends the run)"
        )
        return None

    def _took(self, guard: UpdateGuard, output: StepOutput) -> StepOutput:
        self.in_a_row = 0
        if guard.ess is not None:
            self._lowest = min(self._lowest, guard.ess)
        return output
