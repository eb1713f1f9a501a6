"""Run micro-batches through Megatron's pipeline schedules, with routing replay.

One `PipelineRunner` serves the passes without gradients (old and reference log-probs) and the training
pass. It knows nothing of algorithms: a loss is a function from log-probs and a micro-batch to a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from moe.align import local_routes, row_slice
from moe.replay import ReplayedChunk, Routes
from moe.statistics import RoutingCounter
from mrl.types import LossOutput, MicroBatch, Statistics
from parallel.attention import packed_sequences
from parallel.context import ContextSlice, context_slice
from parallel.groups import Groups
from parallel.logprobs import packed_logprobs
from parallel.model import unwrap

LossFunction = Callable[[Tensor, MicroBatch], LossOutput]
"""(logprobs f32[N] with gradient, micro-batch) -> undivided loss sum and statistics."""

RecordedRoutes = list[dict[int, Tensor]]
"""R2: what this rank's routers chose in an earlier pass, by micro-batch and layer number."""


@dataclass
class PassOutput:
    """What one pass over the micro-batches of this rank gave, in their order."""

    logprobs: list[Tensor] = field(default_factory=list)
    """f32[N] each, 0 off the loss tokens; only on the last pipeline stage."""
    entropies: list[Tensor] = field(default_factory=list)
    """f32[N] each, 0 off the loss tokens; only on the last pipeline stage."""
    losses: list[LossOutput] = field(default_factory=list)
    """Detached; only on the last pipeline stage, and only with a loss."""
    native_routes: RecordedRoutes = field(default_factory=list)
    routing: Statistics = field(default_factory=dict)


class PipelineRunner:
    """The forward (and backward) of this rank's chunks."""

    def __init__(
        self, chunks: list[Any], groups: Groups, temperature: float, recompute: bool
    ) -> None:
        self.chunks = chunks
        self.groups = groups
        self.temperature = temperature
        self.replays = {id(unwrap(c)): ReplayedChunk(unwrap(c), recompute) for c in chunks}
        # The log-prob kernel reads bf16 itself; Megatron's fp32 copy would be its largest tensor.
        half = get_model_config(chunks[0]).bf16
        self._output_options = {"fp32_output": False} if half else {}

    def run(
        self,
        batches: Sequence[MicroBatch],
        loss: LossFunction | None = None,
        replay: RecordedRoutes | bool = False,
    ) -> PassOutput:
        """All micro-batches forward, and backward when there is a `loss`. A collective.

        `replay`: True replays the routes in the micro-batches (R3), a record replays that (R2), False
        lets every router decide for itself.
        """
        output = PassOutput(native_routes=[{} for _ in batches])
        counter = RoutingCounter()
        train = loss is not None

        def forward_step(numbered: Iterator[tuple[int, MicroBatch]], chunk: Any):
            number, batch = next(numbered)
            replayed = self.replays[id(unwrap(chunk))]
            context = context_slice(batch.cu_seqlens, self.groups.cp)
            routes = self._routes(batch, context, replayed, replay, number)
            replayed.begin_forward(routes, with_grad=train)
            logits = chunk(
                context.take(batch.input_ids).unsqueeze(0),
                context.take(batch.position_ids).unsqueeze(0),
                None,
                packed_seq_params=packed_sequences(batch.cu_seqlens, context),
                **self._output_options,
            )
            replayed.end_forward()
            counter.add(number, replayed, routes, self._expected_rows(batch, context))
            if not train:
                output.native_routes[number] |= {
                    n: layer.native_ids
                    for n, layer in replayed.layers.items()
                    if layer.native_ids is not None
                }
            return logits, lambda tensor: self._finish(tensor, batch, context, loss, output)

        numbered = list(enumerate(batches))
        feeds = [iter(numbered) for _ in self.chunks]
        with torch.set_grad_enabled(train):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=feeds if len(feeds) > 1 else feeds[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(batches),
                seq_length=max(b.num_tokens for b in batches),
                micro_batch_size=1,
                forward_only=not train,
            )
        for replayed in self.replays.values():
            replayed.check_drained()
        output.routing = counter.statistics(self.groups.pp)
        return output

    def _finish(
        self,
        logits: Tensor,
        batch: MicroBatch,
        context: ContextSlice,
        loss: LossFunction | None,
        output: PassOutput,
    ) -> tuple[Tensor, Tensor, dict]:
        """Megatron's loss function of one micro-batch, called on the last stage in batch order."""
        logprobs, entropy = packed_logprobs(
            logits.squeeze(0), batch, self.temperature, self.groups.tp, context
        )
        output.logprobs.append(logprobs.detach())
        output.entropies.append(entropy.detach())
        num_tokens = torch.zeros((), dtype=torch.int, device=logprobs.device)  # Megatron's; unused
        if loss is None:
            return logprobs.sum(), num_tokens, {}
        result = loss(logprobs, batch)
        # Megatron scales the tensor that it gets in place.
        output.losses.append(LossOutput(result.loss_sum.detach().clone(), result.stats))
        return result.loss_sum, num_tokens, {}

    def _routes(
        self,
        batch: MicroBatch,
        context: ContextSlice,
        chunk: ReplayedChunk,
        replay: RecordedRoutes | bool,
        number: int,
    ) -> Routes | None:
        if not isinstance(replay, bool):
            return {n: replay[number][n] for n in chunk.layers}
        if not replay:
            return None
        if batch.routes is None:  # an empty micro-batch: padding only
            if bool(batch.loss_mask.any()):
                raise ValueError("moe.routing_replay is r3, but the samples carry no routes")
            return None
        routes = context.take_routes(batch.routes)
        return local_routes(routes, chunk.layers, self.groups.tp_rank, self.groups.dims.tp)

    def _expected_rows(self, batch: MicroBatch, context: ContextSlice) -> Tensor:
        """bool[n]: rows of this rank that lead to a loss token, a later one of the same sequence."""
        so_far = batch.loss_mask.long().cumsum(0)
        ends = batch.cu_seqlens[1:].long() - 1
        lengths = batch.cu_seqlens.diff().long()
        by_the_end = so_far[ends].repeat_interleave(lengths, output_size=batch.num_tokens)
        expected = context.take(so_far < by_the_end)
        return expected[row_slice(len(expected), self.groups.tp_rank, self.groups.dims.tp)]
