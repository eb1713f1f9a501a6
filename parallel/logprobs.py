"""Log-probs and entropy of the loss tokens of a packed micro-batch: from hidden states, in chunks, or
from all of its vocab-parallel logits.

N packed tokens, n of them on this context-parallel rank, V_loc this tensor-parallel rank's slice of the
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mrl.errors import InputError
from mrl.kernels import linear_logprob, vp_logprob
from mrl.types import MicroBatch
from parallel.context import ContextSlice
from parallel.forward import HeadInput, HeadOutput, PassOutput
from parallel.layers.output_layer import Projection


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
    logprobs, entropy = vp_logprob(
        logits,
        context.take(batch.input_ids.roll(-1)),
        context.take(_predicts(batch)),
        temperature=temperature,
        group=group,
        inplace_backward=True,
    )
    return _in_packed_order(logprobs, entropy, context)


def chunked_logprobs(
    hidden: Tensor,
    batch: MicroBatch,
    on_cpu: MicroBatch,
    temperature: float,
    projection: Projection,
    context: ContextSlice,
) -> tuple[Tensor, Tensor]:
    """Compute what `packed_logprobs` does from hidden states [n, h] (under sequence parallelism this
    rank's share of them) and the projection onto the vocabulary: only loss tokens have logits, a chunk
    at a time.

    Where the micro-batch has a sampling mask, log-probs are those of the truncated distribution, over
    the tokens that the engine had kept; the entropy stays that of the whole one.

    `on_cpu`: the micro-batch, where counting its loss tokens waits for nothing.
    """
    hidden = projection.gathered(hidden)
    predicts = _predicts(on_cpu)
    mine = predicts if context.index is None else predicts[context.packed]
    rows = mine.nonzero().squeeze(1).to(hidden.device, non_blocking=True)
    labels = context.take(batch.input_ids.roll(-1))[rows]
    kept = None
    if on_cpu.sampling_mask is not None:
        places = mine.nonzero().squeeze(1)
        tokens = (places if context.index is None else context.packed[places]) + 1
        kept = on_cpu.sampling_mask.rows(tokens).to(hidden.device, non_blocking=True)
    how = projection.chunked(temperature)
    found = linear_logprob(hidden, projection.weight, labels, rows, how, kept)
    logprobs, entropy = (
        torch.zeros(len(hidden), device=hidden.device).index_copy(0, rows, values)
        for values in found
    )
    return _in_packed_order(logprobs, entropy, context)


def _predicts(batch: MicroBatch) -> Tensor:
    """bool[N]: rows whose next token is a loss token; nothing predicts a sequence's first token."""
    return (batch.loss_mask & (batch.position_ids > 0)).roll(-1)


def _in_packed_order(
    logprobs: Tensor, entropy: Tensor, context: ContextSlice
) -> tuple[Tensor, Tensor]:
    """Values of this rank's rows f32[n] -> of all packed tokens f32[N], each where its token is."""
    if context.index is not None:
        logprobs, entropy = context.gather(torch.stack([logprobs, entropy], dim=1)).unbind(1)
    # The last row predicts nothing and is 0, so what rolls around to the front is too.
    return logprobs.roll(1), entropy.roll(1)


@dataclass(frozen=True)
class LogprobHead:
    """What the output of a language model is: log-probs at the sampling temperature, and entropy."""

    temperature: float
    tp: ProcessGroup

    def __call__(self, given: HeadInput, output: PassOutput) -> HeadOutput:
        """Logits [1, n, V_loc], or hidden states and a projection -> logprobs f32[N] and entropy f32[N]
        with gradient; both go into `output`, detached."""
        states, context = given.states.squeeze(0), given.context
        if given.projection is None and given.on_cpu.sampling_mask is not None:
            raise InputError(
                "train.logprob_chunk_tokens is 0, but the samples have sampling masks; give it a "
                "number of tokens, such as 1024"
            )
        if given.projection is None:
            logprobs, entropy = packed_logprobs(
                states, given.batch, self.temperature, self.tp, context
            )
        else:
            logprobs, entropy = chunked_logprobs(
                states, given.batch, given.on_cpu, self.temperature, given.projection, context
            )
        output.logprobs.append(logprobs.detach())
        output.entropies.append(entropy.detach())
        return HeadOutput(logprobs, entropy)
