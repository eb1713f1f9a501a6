"""Counts the optimizer steps that were skipped because something was not finite.

Megatron does the same where its loss scaler finds an infinity: it skips the step, and the learning-rate
schedule does not advance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mrl.errors import NotFinite
from parallel.megatron_model import StepOutput


@dataclass
class NonFiniteSteps:
    """`NonFiniteSteps` takes the optimizer steps of one model, and skips those that are not finite.

    All ranks see the same, as a step raises NotFinite on all of them or on none.
    """

    model: str
    """The model in words, for messages."""
    limit: int
    """`guards.max_nonfinite_steps`: this many in a row end the run."""
    warn: Callable[[str], None]
    in_a_row: int = 0
    num_skipped: int = field(default=0, init=False)
    """All that were skipped since `begin`."""

    def begin(self) -> None:
        """Begin to count `num_skipped` anew; `in_a_row` stays."""
        self.num_skipped = 0

    def take(self, step: int, train_step: Callable[[], StepOutput | None]) -> StepOutput | None:
        """Return what an optimizer step gave; None where it was skipped, here or by `train_step`.

        Raises NotFinite where it is the last of `limit` in a row.
        """
        try:
            output = train_step()
        except NotFinite as error:
            text = str(error)  # the error itself would keep the activations
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
