"""Log-probs and entropy of the loss tokens of packed micro-batches, and log-probs of whole
sequences.

They are computed either from hidden states, with the logits of a few rows at a time, or from all
vocab-parallel logits of a micro-batch.

Dimensions: N packed tokens, n of them on this context-parallel rank, V_loc this tensor-parallel
rank's slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.routes import Replay
from mrl.errors import InputError
from mrl.kernels import linear_logprob, vp_logprob
from mrl.types import MicroBatch, Sample
from parallel.context import ContextSlice
from parallel.heads import HeadInput, HeadOutput
from parallel.layers.output_layer import Projection
from parallel.megatron_model import MegatronModel
from parallel.mesh import Mesh
from parallel.packing import WeightedSample, pack
from parallel.pass_output import PassOutput


def packed_logprobs(
    logits: Tensor,
    batch: MicroBatch,
    temperature: float,
    group: ProcessGroup,
    context: ContextSlice,
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each loss token given the tokens before it, and the entropy of the
    distribution that predicts the token.

    `logits` [n, V_loc] belong to this context-parallel rank's tokens; the row of token t predicts
    token t + 1. Return log-probs f32[N] and entropies f32[N] of all tokens, both differentiable.
    Both are 0 at the first token of a sequence and at tokens without loss (or outside of
    `batch.scored`); the rows that predict these tokens are not read. The backward pass overwrites
    the logits. `temperature` is the sampling temperature, so that the numbers are comparable with
    the engine's.
    """
    predicts = _predicts(batch)
    logprobs, entropy = vp_logprob(
        logits,
        context.take(_labels(batch)),
        context.take_any(predicts),
        temperature=temperature,
        group=group,
        inplace_backward=True,
    )
    return _in_packed_order(logprobs, entropy, predicts, context)


def chunked_logprobs(
    hidden: Tensor,
    batch: MicroBatch,
    on_cpu: MicroBatch,
    temperature: float,
    projection: Projection,
    context: ContextSlice,
) -> tuple[Tensor, Tensor]:
    """Compute the same as `packed_logprobs` from hidden states and the projection onto the
    vocabulary.

    `hidden` is [n, h], or under sequence parallelism this rank's part of these rows. Logits are
    computed for loss tokens only, for a few rows at a time. If the micro-batch has a sampling mask,
    the log-probs are those of the truncated distribution, over the tokens that the engine kept; the
    entropy is still that of the whole distribution. `on_cpu` is the micro-batch on the CPU, where
    counting its loss tokens does not wait for a GPU.
    """
    hidden = projection.gathered(hidden)
    mine = context.take_any(_predicts(on_cpu))
    rows = mine.nonzero().squeeze(1).to(hidden.device, non_blocking=True)
    labels = context.take(_labels(batch))[rows]
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
    return _in_packed_order(logprobs, entropy, _predicts(batch), context)


def _predicts(batch: MicroBatch) -> Tensor:
    """Return bool[N]: true for rows that predict a token whose log-prob is computed: by default the
    next token if it is a loss token and not the first token of a sequence."""
    wanted = batch.loss_mask if batch.scored is None else batch.scored
    return (wanted & (batch.position_ids > 0)).roll(-1)


def _labels(batch: MicroBatch) -> Tensor:
    """Return i64[N]: for each row, the token whose log-prob it gives."""
    return (batch.input_ids if batch.targets is None else batch.targets).roll(-1)


def _in_packed_order(
    logprobs: Tensor, entropy: Tensor, predicts: Tensor, context: ContextSlice
) -> tuple[Tensor, Tensor]:
    """Turn values f32[n] of this rank's rows into values f32[N] of all packed tokens.

    The value of row t becomes the value of token t + 1, which row t predicts. If sequences share row t,
    it may predict a loss token of one sequence and a token without loss of another. So `predicts`,
    bool[N], says for each packed token whether the value of its row is kept; otherwise 0 takes its
    place.
    """
    if context.index is not None:
        both = context.gather(torch.stack([logprobs, entropy], dim=1))
        if context.shared_places is not None:
            both = torch.where(predicts.unsqueeze(1), both, 0.0)
        logprobs, entropy = both.unbind(1)
    # The last row predicts nothing and is 0, so a 0 rolls around to the front.
    return logprobs.roll(1), entropy.roll(1)


@dataclass(frozen=True)
class LogprobHead:
    """The head of a language model, which computes log-probs and entropies at the sampling
    temperature."""

    temperature: float
    tp: ProcessGroup

    def __call__(self, given: HeadInput, output: PassOutput) -> HeadOutput:
        """Compute logprobs f32[N] and entropy f32[N] with gradient; add both, detached, to
        `output`.

        `given.states` are logits [1, n, V_loc], or hidden states if there is a projection. Raises
        InputError for samples with sampling masks if there is no projection.
        """
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


def sequence_logprobs(model: MegatronModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probs f32[T] of each sequence i64[T] under the current weights at temperature
    1.

    The log-prob of a sequence's first token is 0. Routers choose the experts themselves. A
    collective: every data-parallel replica computes all sequences, and every rank gets the same
    result. These numbers are used to compare trainer and engine.
    """
    mesh = model.mesh
    batch = _batch(sequences, mesh)
    repeats = mesh.dims.pp if mesh.dims.vpp > 1 else 1  # the interleaved schedule needs a multiple
    head = LogprobHead(1.0, mesh.tp)
    output = model.forward_only([batch] * repeats, Replay.off, head=head)
    logprobs = torch.zeros(batch.num_tokens, device=mesh.device)
    if mesh.reports_loss and mesh.dp_rank == 0:  # true on exactly one rank
        logprobs += output.logprobs[0]
    if mesh.dims.world > 1:
        dist.all_reduce(logprobs)
    starts = batch.cu_seqlens.tolist()
    return [
        logprobs[start : start + len(sequence)].cpu()
        for start, sequence in zip(starts, sequences, strict=False)
    ]


def _batch(sequences: Sequence[Tensor], mesh: Mesh) -> MicroBatch:
    samples = [
        Sample(
            group_id=0,
            token_ids=sequence,
            prompt_len=1,
            loss_mask=torch.arange(len(sequence)) > 0,
            rollout_logprobs=torch.zeros(len(sequence)),
            weight_versions=(),
            finish_reason="length",
        )
        for sequence in sequences
    ]
    return pack(
        [WeightedSample(sample, 0.0, 0.0) for sample in samples],
        mesh.dims.token_multiple,
        sequence_multiple=mesh.dims.sequence_multiple,
    )
