"""Run micro-batches through Megatron's pipeline schedules, with routing replay.

One `PipelineRunner` serves the passes without gradient (old and reference log-probs) and the training
pass. It knows nothing of algorithms: a loss is a function from log-probs and a micro-batch to a sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from moe.align import RouterRows, local_routes, router_rows, row_slice
from moe.replay import ReplayedChunk
from moe.router_shift import router_scores, router_shift
from moe.routes import Replay, Route, Routes, ids_of
from moe.statistics import RoutingCounter
from mrl.system.heartbeat import beat
from mrl.types import LossOutput, MicroBatch, Statistics
from parallel.context import ContextSlice, context_slice
from parallel.heads import ExtraLoss, Head, HeadInput
from parallel.layers.attention import packed_sequences
from parallel.layers.balancing import RouterLosses
from parallel.layers.output_layer import Projection
from parallel.mesh import Mesh
from parallel.model import unwrap
from parallel.packing import num_rows, to_device
from parallel.pass_output import Observe, ObservedRoutes, PassOutput

LossFunction = Callable[[Tensor, MicroBatch], LossOutput]
"""Takes the head's output f32[N] (with gradient) and the micro-batch. Returns the loss and its
statistics. The loss is a sum, and is not normalised later."""


@dataclass(frozen=True)
class _Pass:
    """The arguments and results of one call of `PipelineRunner.run`."""

    loss: LossFunction | None
    replay: Replay
    head: Head
    observe: Observe | None
    output: PassOutput
    counter: RoutingCounter
    keep_scores: bool
    keep_keys: bool
    extra_loss: ExtraLoss | None

    def finish(self, given: HeadInput, shift: Tensor | None) -> tuple[Tensor, Tensor, dict]:
        """Return the sum of the loss, a token count and metrics, in the form that Megatron expects.

        mrl uses neither the count nor the metrics. `shift` is `MicroBatch.router_shift`.
        """
        found = self.head(given, self.output)
        result = found.result
        num_tokens = torch.zeros((), dtype=torch.int, device=result.device)
        if self.loss is None:
            return result.sum(), num_tokens, {}
        batch = dataclasses.replace(given.batch, entropy=found.entropy, router_shift=shift)
        loss = self.loss(result, batch)
        total, stats = loss.loss_sum, loss.stats
        if self.extra_loss is not None:
            extra, more = self.extra_loss(given)
            total, stats = total + extra, stats | more
        # A clone, because Megatron scales the loss in place.
        self.output.losses.append(LossOutput(loss.loss_sum.detach().clone(), stats))
        return total, num_tokens, {}


class PipelineRunner:
    """Runs micro-batches through this rank's chunks: forward, and backward in training."""

    def __init__(
        self,
        chunks: list[Any],
        mesh: Mesh,
        head: Head,
        recompute: bool,
        router_losses: RouterLosses,
        gates: bool = False,
        overlaps_reduction: bool = False,
        recomputes_attention: bool = False,
    ) -> None:
        """Prepare the chunks for passes.

        `recompute` says whether the routers run a second time in the backward pass, and
        `recomputes_attention` whether the indexers of sparse attention do. With `gates`, a
        pass also replays the gate weights of routes that have them, and records gate weights for a
        later `Replay.recorded`. `overlaps_reduction` says whether hooks reduce the gradients while
        the backward pass runs.
        """
        self.chunks = chunks
        self._gates = gates
        self.mesh = mesh
        self.head = head
        self.router_losses = router_losses
        self.extra_loss: ExtraLoss | None = None
        """A loss that training passes add to the algorithm's."""
        self.projections = {id(c): Projection.of(unwrap(c), overlaps_reduction) for c in chunks}
        self.replays = {
            id(unwrap(c)): ReplayedChunk(unwrap(c), recompute, recomputes_attention) for c in chunks
        }
        # The head reads bf16; Megatron's fp32 copy of the logits would be the largest tensor of a pass.
        half = get_model_config(chunks[0]).bf16
        self._output_options = {"fp32_output": False} if half else {}

    def run(
        self,
        batches: Sequence[MicroBatch],
        loss: LossFunction | None = None,
        replay: Replay = Replay.off,
        head: Head | None = None,
        observe: Observe | None = None,
        keep_scores: bool = False,
        keep_keys: bool = False,
    ) -> PassOutput:
        """Run all micro-batches forward, and backward if there is a `loss`. A collective.

        `head` replaces the model's own head in this pass. With `keep_keys` the output has
        `chosen_keys`. With `keep_scores` it has `router_scores`; that and `replay.scores` need whole
        rows and layers on this rank. Raises ValueError for micro-batches of several lengths if the
        layout needs one, and for samples that lack the routes or gate weights that `replay` needs.
        """
        lengths = sorted({num_rows(batch) for batch in batches})
        if self.mesh.dims.equal_micro_batches and len(lengths) > 1:
            raise ValueError(
                f"micro-batches of {lengths} rows: this layout takes one length; pad them with the "
                "min_rows of parallel.packing.pack"
            )
        empty: list[list[dict]] = [[{} for _ in batches] for _ in range(3)]
        output = PassOutput(native_routes=empty[0], observed=empty[1], chosen_keys=empty[2])
        counter, head = RoutingCounter(), head or self.head
        train = loss is not None
        extra = self.extra_loss if train else None
        current = _Pass(loss, replay, head, observe, output, counter, keep_scores, keep_keys, extra)
        numbered = list(enumerate(batches))
        feeds = [iter(numbered) for _ in self.chunks]
        if extra is not None:
            extra.begin_step(batches)
        with torch.set_grad_enabled(train):
            get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, current),
                data_iterator=feeds if len(feeds) > 1 else feeds[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(batches),
                seq_length=max(map(num_rows, batches)),
                micro_batch_size=1,
                forward_only=not train,
            )
        for replayed in self.replays.values():
            replayed.check_drained()
        output.routing = counter.statistics(self.mesh.pp) | self._loads(counter)
        if extra is not None:
            extra.end_step()
        if train:
            output.routing |= self.router_losses.end_step()
        return output

    def _forward_step(
        self, current: _Pass, numbered: Iterator[tuple[int, MicroBatch]], chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Run one chunk on its next micro-batch; Megatron calls this. Return the chunk's output, and a
        function that turns it into the loss. Megatron calls that function on the last stage, in the
        order of the micro-batches.
        """
        beat()
        number, on_cpu = next(numbered)
        batch = to_device(on_cpu, self.mesh.device)
        replayed = self.replays[id(unwrap(chunk))]
        context = self._context(on_cpu, self.mesh.device)
        kind, train = current.replay.kind, current.loss is not None
        captured = None
        if kind == "rollout" or current.observe:
            captured = self._captured(batch, context, replayed, must=kind == "rollout")
        routes = captured if kind == "rollout" else None
        if kind == "recorded":
            routes = current.replay.routes[number]
        routes = self._with_gates_or_not(routes)
        rows = router_rows(batch, *self._row_places(context))
        compares = train and bool(current.replay.scores)
        replayed.begin_forward(
            routes,
            with_grad=train,
            watch=current.observe is not None,
            scores=compares or current.keep_scores,
            keys=current.replay.keys[number] if current.replay.keys else None,
            keep_keys=current.keep_keys,
        )
        if train:
            self.router_losses.begin_forward(unwrap(chunk), rows)
        packed = packed_sequences(on_cpu.cu_seqlens, context, self.mesh.device)
        states = chunk(
            context.take(batch.input_ids).unsqueeze(0),
            context.take(batch.position_ids).unsqueeze(0),
            None,
            packed_seq_params=packed,
            **self._output_options,
        )
        if not train and kind == "off":
            current.output.native_routes[number] |= self._native_routes(replayed)
        current.output.chosen_keys[number] |= replayed.chosen_keys()
        if current.keep_scores:
            current.output.router_scores.append(router_scores(replayed))
        shift = router_shift(replayed, current.replay.scores[number]) if compares else None
        replayed.end_forward()
        compared = captured if captured is not None else routes
        current.counter.add(number, replayed, compared, rows, replays=routes is not None)
        if current.observe == "rows" and captured is not None:
            current.output.observed[number] |= _observed(replayed, captured, rows)
        projection = self.projections[id(chunk)]
        return states, lambda tensor: current.finish(
            HeadInput(tensor, batch, on_cpu, context, projection, packed), shift
        )

    def captured(self, batches: Sequence[MicroBatch]) -> list[dict[int, Route]]:
        """Return, for each micro-batch, a dict that maps each layer of this rank to the route that
        the engine captured, restricted to this rank's rows. The dict of a micro-batch without
        captured routes is empty.

        A pass that replays the result as `Replay.recorded(...)` computes the same as a pass with
        `Replay.rollout`.
        """
        found: list[dict[int, Route]] = []
        for on_cpu in batches:
            batch = to_device(on_cpu, self.mesh.device)
            context = self._context(on_cpu, self.mesh.device)
            routes: dict[int, Route] = {}
            for chunk in self.replays.values():
                routes |= self._captured(batch, context, chunk, must=False) or {}
            found.append(routes)
        return found

    def row_places(self, batch: MicroBatch) -> Tensor:
        """Return i64[m] on the CPU: for each of the m entries of `router_rows`, the index of its
        packed token."""
        places, *_ = self._row_places(self._context(batch, torch.device("cpu")))
        return torch.arange(batch.num_tokens)[places] if isinstance(places, slice) else places

    def router_rows(self, batch: MicroBatch) -> RouterRows:
        """Return the rows of a micro-batch, which is on the CPU, that this rank's routers process."""
        return router_rows(batch, *self._row_places(self._context(batch, torch.device("cpu"))))

    def _context(self, batch: MicroBatch, device: torch.device) -> ContextSlice:
        """Return this rank's part of a micro-batch, which is on the CPU, with tensors on `device`."""
        return context_slice(batch.cu_seqlens, self.mesh.cp, device, batch.shared)

    @contextmanager
    def replaying_gates(self, gates: bool) -> Iterator[None]:
        """Context manager. Forward passes in its `with` statement replay expert ids, and also gate
        weights if `gates` is true."""
        before, self._gates = self._gates, gates
        try:
            yield
        finally:
            self._gates = before

    def _with_gates_or_not(self, routes: Routes | None) -> Routes | None:
        if routes is None or self._gates:
            return routes
        return {number: ids_of(route) for number, route in routes.items()}

    def _captured(
        self, batch: MicroBatch, context: ContextSlice, chunk: ReplayedChunk, must: bool
    ) -> dict[int, Route] | None:
        if batch.routes is None:  # an empty micro-batch: padding only
            if must and bool(batch.loss_mask.any()):
                raise ValueError("moe.routing_replay is r3, but the samples carry no routes")
            return None
        if must and self._gates and batch.routes.weights is None:
            raise ValueError(
                "moe.replay asks for gate weights, but the routes of the samples carry none; roll out "
                "with rollout.return_routing_weights=true, or set moe.replay=ids"
            )
        routes = context.take_routes(batch.routes)
        return local_routes(routes, chunk.layers, self.mesh.tp_rank, self.mesh.dims.tp)

    def _native_routes(self, chunk: ReplayedChunk) -> dict[int, Route]:
        layers = {n: layer for n, layer in chunk.layers.items() if layer.native_ids is not None}
        if self._gates:
            return {n: layer.native_gates() for n, layer in layers.items()}
        return {n: layer.native_ids for n, layer in layers.items() if layer.native_ids is not None}

    def _row_places(
        self, context: ContextSlice
    ) -> tuple[slice | Tensor, Tensor | None, int | None]:
        """Return (`places`, `source`, `num_rows`) for the m packed tokens whose rows this rank's
        routers process.

        `places` selects these tokens from all packed tokens: a slice, or indices i64[m]. `source` is
        `RouterRows.source`: the row of each of these tokens. `num_rows` is the number of these rows.
        The last two are None if no rows are shared.
        """
        own = row_slice(context.num_rows, self.mesh.tp_rank, self.mesh.dims.tp)
        if context.index is None:
            return own, None, None
        if context.shared_places is None:
            return context.index[own], None, None
        packed, source = context.tokens_of_rows(own)
        device = context.index.device
        places, source = (x.to(device, non_blocking=True) for x in (packed, source))
        return places, source, own.stop - own.start

    def _loads(self, counter: RoutingCounter) -> Statistics:
        config = get_model_config(self.chunks[0])
        frequency = config.moe_layer_freq
        if isinstance(frequency, int):
            frequency = [int(n % frequency == 0) for n in range(config.num_layers)]
        numbers = [n + 1 for n, is_moe in enumerate(frequency) if is_moe]
        return counter.load_statistics(numbers, config.num_moe_experts or 0, self.mesh.device)


def _observed(
    chunk: ReplayedChunk, captured: Routes, rows: RouterRows
) -> dict[int, ObservedRoutes]:
    found = {}
    for number, layer in chunk.layers.items():
        assert layer.native_ids is not None
        assert layer.margins is not None
        found[number] = ObservedRoutes(
            rows.of(ids_of(captured[number])).short(),
            rows.of(layer.native_ids).short(),
            rows.of(layer.margins),
        )
    return found
