"""Log-probs and entropy of the loss tokens of a packed micro-batch, from vocab-parallel logits.

N packed tokens, n of them on this context-parallel rank, V_loc this tensor-parallel rank's slice of the
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mrl.kernels import vp_logprob
from mrl.types import MicroBatch
from parallel.context import ContextSlice
from parallel.forward import PassOutput


def packed_logprobs(
    logits: Tensor,
    batch: MicroBatch,
    temperature: float,
    group: ProcessGroup,
    context: ContextSlice,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each loss token given those before it, and the entropy of its distribution.

    logits [n, V_loc] of this context-parallel rank's tokens (the row of token t predicts token t+1),
    which the backward overwrites -> logprobs f32[N] (differentiable), entropy f32[N] (differentiable)
    of all tokens; both 0 off the loss tokens, whose rows are not even read, and on the first token of
    a sequence. `temperature` is the sampling temperature, so that the numbers compare with the
    engine's.
    """
    wanted = batch.loss_mask & (batch.position_ids > 0)  # nothing predicts a sequence's first token
    logprobs, entropy = vp_logprob(
        logits,
        context.take(batch.input_ids.roll(-1)),
        context.take(wanted.roll(-1)),
        temperature=temperature,
        group=group,
        inplace_backward=True,
    )
    if context.index is not None:
        logprobs, entropy = context.gather(torch.stack([logprobs, entropy], dim=1)).unbind(1)
    # The last row predicts nothing and is 0, so what rolls around to the front is too.
    return logprobs.roll(1), entropy.roll(1)


@dataclass(frozen=True)
class LogprobHead:
    """What the output of a language model is: log-probs at the sampling temperature, and entropy."""

    temperature: float
    tp: ProcessGroup

    def __call__(
        self, logits: Tensor, batch: MicroBatch, context: ContextSlice, output: PassOutput
    ) -> Tensor:
        """logits [1, n, V_loc] -> logprobs f32[N] with gradient; both go into `output`, detached."""
        logprobs, entropy = packed_logprobs(
            logits.squeeze(0), batch, self.temperature, self.tp, context
        )
        output.logprobs.append(logprobs.detach())
        output.entropies.append(entropy.detach())
        return logprobs
