"""Log-probs and entropy of the loss tokens of a packed micro-batch, from vocab-parallel logits.

N packed tokens, B packed sequences, V_loc this tensor-parallel rank's slice of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from mrl.kernels import vp_logprob
from mrl.types import MicroBatch
from parallel.forward import PassOutput


def packed_logprobs(
    logits: Tensor, batch: MicroBatch, temperature: float, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-prob of each loss token given those before it, and the entropy of its distribution.

    logits [N, V_loc] (row n predicts token n+1), which the backward overwrites -> logprobs f32[N]
    (differentiable), entropy f32[N] (differentiable); both 0 off the loss tokens, whose rows are not
    even read, and on the first token of a sequence. `temperature` is the sampling temperature, so
    that the numbers compare with the engine's.
    """
    wanted = batch.loss_mask & (batch.position_ids > 0)  # nothing predicts a sequence's first token
    logprobs, entropy = vp_logprob(
        logits,
        batch.input_ids.roll(-1),
        wanted.roll(-1),
        temperature=temperature,
        group=group,
        inplace_backward=True,
    )
    # The last row predicts nothing and is 0, so what rolls around to the front is too.
    return logprobs.roll(1), entropy.roll(1)


@dataclass(frozen=True)
class LogprobHead:
    """What the output of a language model is: log-probs at the sampling temperature, and entropy."""

    temperature: float
    tp: ProcessGroup

    def __call__(self, logits: Tensor, batch: MicroBatch, output: PassOutput) -> Tensor:
        """logits [1, N, V_loc] -> logprobs f32[N] with gradient; both go into `output`, detached."""
        logprobs, entropy = packed_logprobs(logits.squeeze(0), batch, self.temperature, self.tp)
        output.logprobs.append(logprobs.detach())
        output.entropies.append(entropy.detach())
        return logprobs
