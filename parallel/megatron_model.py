"""A Megatron model on this rank: chunks, weights, passes, optimizer steps, and moves off the device.

The subclasses `Policy` and `Critic` define what the model's output means.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.distributed import finalize_model_grads

from moe.align import router_rows
from moe.routes import Replay
from mrl.config import MoeConfig, OptimizerConfig
from mrl.config.adapter import Adapter
from mrl.errors import NotFinite
from mrl.system.heartbeat import phase
from mrl.types import MicroBatch, Statistics, Sum, TrainBatch
from parallel.base import Attachments, Base, GatherHooks
from parallel.forward import LossFunction, PipelineRunner
from parallel.heads import Head
from parallel.layer_hooks import BackwardWatch
from parallel.layers.balancing import RouterLosses, expert_biases
from parallel.ledger import Ledger, gradient_tensors, optimizer_tensors, parameter_tensors
from parallel.lora.adapted import Adaptation
from parallel.lora.weights import AdapterMap, LoraSetup
from parallel.model import unwrap, wrap_chunks
from parallel.optimizer.adam_step import AdamStep
from parallel.optimizer.setup import build_optimizer
from parallel.optimizer.state import free_gradient_copies
from parallel.options.read import MegatronOptions
from parallel.pass_output import UNOBSERVED, Observe, Observer, PassOutput
from parallel.reduce import merge
from parallel.transformer_config import build_ddp_config
from parallel.weights import WeightMap


@dataclass(frozen=True)
class StepOutput:
    """The results of one optimizer step, the same on every rank unless noted otherwise."""

    grad_norm: float
    """The norm of the gradient of all parameters, before clipping."""
    lr: float
    stats: Statistics
    """This rank's part of the statistics, among them the sum of the losses under `loss_key`."""
    output: PassOutput
    """The results of the step's forward pass, under the weights before the step."""


class MegatronModel:
    """One Megatron model on this rank, with an optimizer if it is trained.

    It has everything that policy and critic have in common: chunks, weights, passes, optimizer, and
    the ledger entries through which its memory moves. The runner's head decides what the model's output
    means. Every method except those that only move memory is a collective. A model without an
    optimizer has weights only, without gradient buffers and optimizer state.
    """

    loss_key: ClassVar[str]
    """The metric under which the sum of the losses is reported."""
    optimizer: Any = None
    """Megatron's optimizer; None before `make_optimizer`."""
    scheduler: Any = None
    """Megatron's schedule of the learning rate; None before `make_optimizer`."""

    def __init__(
        self,
        base: Base,
        head: Head,
        *,
        optimizer: OptimizerConfig | None,
        moe: MoeConfig,
        ledger: Ledger,
        name: str = "",
        prefix: str = "",
        options: MegatronOptions = MegatronOptions(),  # noqa: B008
        lora: LoraSetup | None = None,
    ) -> None:
        """Set up passes and training on the chunks of `base`. Its weights are random until `load`.

        `optimizer` is None for a model that is never trained. `name` is used in messages. The
        model's kinds in the ledger begin with `prefix`. `options` is the recipe's `megatron` section.
        `lora` describes the adapter that is trained instead of the weights, if any.
        """
        self.base, self.mesh, self.ledger = base, base.mesh, ledger
        self.name, self._prefix = name, prefix
        self._optimizer_config, self._options = optimizer, options
        self.attachments = Attachments()
        model, mesh = base.setup.model, base.mesh
        self._settings, self.chunks = base.settings, base.chunks
        self.lora = None
        base.take(self, 0 if lora is None else lora.seed)
        if lora is not None:
            self.lora = self.attachments.add(Adaptation(lora, model, mesh, base.chunks))
        distributed = optimizer is not None and optimizer.divides_ranges
        ddp = None if optimizer is None else build_ddp_config(distributed, options)
        if ddp is not None:
            # A copy: Megatron's schedules read this model's functions in it. Layers have the base's.
            self._settings = copy.copy(base.settings)
            self.chunks = wrap_chunks(base.chunks, self._settings, ddp)
            self.attachments.add(GatherHooks(self.chunks))
        self.weights = WeightMap(model, mesh, self.chunks)
        self.trained = self.weights if self.lora is None else self.lora.map_of(self.chunks)
        self.router_losses = self.attachments.add(RouterLosses(moe, map(unwrap, self.chunks)))
        self.runner = PipelineRunner(
            self.chunks,
            mesh,
            head,
            base.setup.recomputes_routers,
            self.router_losses,
            gates="weights" in moe.replay,
            overlaps_reduction=ddp is not None and ddp.overlap_grad_reduce,
            recomputes_attention=base.setup.recompute,
        )
        for replayed in self.runner.replays.values():
            self.attachments.add(replayed)
        watched = map(unwrap, self.chunks) if ddp is not None else ()
        self._backward_watch = self.attachments.add(BackwardWatch(watched))
        ledger.own(prefix + "parameters", self._parameter_tensors, keeps_frozen=True)
        if ddp is not None:
            self._prepare_training(ddp.overlap_grad_reduce)

    def _parameter_tensors(self) -> Iterable[torch.Tensor]:
        """Return this model's own weights: all of them, or only the adapter's on a shared base."""
        if self.base.is_shared:
            return [entry.parameter for entry in self.trained.entries]
        return parameter_tensors(self.chunks)

    def _prepare_training(self, overlaps_reduction: bool) -> None:
        """Set up how gradients are reduced; register gradients and optimizer in the memory ledger."""
        # The loss carries its own normaliser; Megatron would divide by the number of tokens.
        self._settings.finalize_model_grads_func = self._finish_gradients
        if overlaps_reduction:
            # Only the backward pass of the last micro-batch reduces gradients.
            contexts: list[Any] = [chunk.no_sync for chunk in self.chunks]
            self._settings.no_sync_func = contexts if len(contexts) > 1 else contexts[0]  # pyright: ignore[reportAttributeAccessIssue]
        gradients, optimizer = self._prefix + "gradients", self._prefix + "optimizer"
        self.ledger.own(gradients, lambda: gradient_tensors(self.chunks), disposable=True)
        self.ledger.own(optimizer, self._optimizer_tensors)

    def _finish_gradients(self, chunks: Any, num_tokens: Any = None, **kwargs: Any) -> None:
        finalize_model_grads(chunks, None, **kwargs)
        if self.lora is not None:
            self.lora.sum_expert_gradients(self.trained)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is trained; None if all weights are trained."""
        return None if self.lora is None else self.lora.setup.adapter

    @property
    def own_kinds(self) -> tuple[str, ...]:
        """This model's kinds in the memory ledger (such as `parameters`), without a shared base's."""
        training = () if self._optimizer_config is None else ("gradients", "optimizer")
        return tuple(self._prefix + kind for kind in ("parameters", *training))

    @property
    def _parameter_kinds(self) -> tuple[str, ...]:
        return (*self.base.kinds, self._prefix + "parameters")

    @phase("load")
    def load(self, may_lack: Collection[str] = ()) -> None:
        """Load the weights (except a shared base's), set up the adapter, and make the optimizer.
        Tensors that `may_lack` names may be missing from the model folder."""
        if not self.base.is_shared:
            self.weights.load(may_lack)
        if isinstance(self.trained, AdapterMap):
            self.trained.begin()
        if self._optimizer_config is not None:
            self.make_optimizer(self._optimizer_config)

    def make_optimizer(self, config: OptimizerConfig) -> None:
        """Make a new optimizer and schedule for the current weights; earlier moments are lost. Raises
        RuntimeError for a model that was made without an optimizer."""
        self._require_trainable()
        self.require_state()
        self.optimizer, self.scheduler = build_optimizer(
            config, self.chunks, self.base.dtype, self.weights, self._options
        )
        self._settings.grad_scale_func = self.optimizer.scale_loss

    def close(self) -> None:
        """Free the memory of weights, gradients and optimizer state; the model is unusable afterwards.

        A shared base is kept. Without this call the model would stay in memory, because Megatron's
        hooks make reference cycles in autograd's C++ that Python cannot collect.
        """
        if not self.base.release(self):
            return  # it is closed already, and another policy may have its name
        for kind in self.own_kinds:
            self.ledger.drop(kind)
        # The cycle: layers -> tensors of their last pass -> graph -> gradient accumulators -> hooks ->
        # Megatron's wrapper -> layers. It would also keep all process groups, with their threads and
        # open files.
        for chunk in self.chunks if self.chunks is not self.base.chunks else ():
            vars(chunk).clear()

    def _require_trainable(self) -> None:
        if self._optimizer_config is None:
            raise RuntimeError("this model was made without an optimizer: it cannot be trained")

    def _optimizer_tensors(self) -> Iterable[torch.Tensor]:
        return () if self.optimizer is None else optimizer_tensors(self.optimizer)

    def require_parameters(self) -> None:
        """Raise RuntimeError if the model is not mounted, or its weights are not on the device."""
        self.base.require_mounted(self)
        self.ledger.require_on_device(*self._parameter_kinds)

    def require_state(self) -> None:
        """Raise RuntimeError if the model is not mounted, or not all of it is on the device."""
        self.base.require_mounted(self)
        self.ledger.require_on_device(*self.base.kinds, *self.own_kinds)

    def gather_parameters(self) -> None:
        """Gather the current weights on all ranks. A collective. Call it before anything other than a
        forward pass reads them. Without `overlap_param_gather` all ranks have them already.
        """
        for chunk in self.chunks if self._optimizer_config is not None else ():
            if not chunk.ddp_config.overlap_param_gather:
                continue
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if not group.param_gather_dispatched or group.param_gather_handle is not None:
                    group.start_param_sync(force_sync=True)

    def forward_only(
        self,
        batches: Sequence[MicroBatch],
        replay: Replay,
        *,
        head: Head | None = None,
        observe: Observe | None = None,
        keep_scores: bool = False,
        keep_keys: bool = False,
    ) -> PassOutput:
        """Run all micro-batches forward, without gradient. For the options see `PipelineRunner.run`."""
        self.require_parameters()
        for chunk in self.chunks:
            chunk.eval()
        return self.runner.run(batches, None, replay, head, observe, keep_scores, keep_keys)

    def train_step(
        self,
        batch: TrainBatch,
        loss: LossFunction,
        replay: Replay,
        before_update: Callable[[], None] | None = None,
        observer: Observer = UNOBSERVED,
    ) -> StepOutput:
        """Compute the gradients of the global batch, call `before_update`, take one optimizer step.

        `observer` gets the forward pass's output before `before_update` is called. Either may raise,
        but then on all ranks. Raises NotFinite on all ranks if a gradient of any rank is not finite,
        and RuntimeError without an optimizer. After any of these errors, weights, buffers, optimizer
        state and learning-rate schedule are as before the call, bit for bit.
        """
        output = self.compute_gradients(batch, loss, replay, before_update, observer)
        grad_norm, lr = self.apply_gradients()
        return StepOutput(grad_norm, lr, self.statistics(output), output)

    def compute_gradients(
        self,
        batch: TrainBatch,
        loss: LossFunction,
        replay: Replay,
        before_update: Callable[[], None] | None = None,
        observer: Observer = UNOBSERVED,
    ) -> PassOutput:
        """Do the first half of `train_step`: leave the gradients, summed over ranks, in the buffers."""
        self.zero_gradients()
        for chunk in self.chunks:
            chunk.train()
        micro_batches = batch.micro_batches
        counted = sum(int(router_rows(b, slice(None)).counted.sum()) for b in micro_batches)
        num_tokens = torch.tensor(counted, device=self.mesh.device)
        self.router_losses.begin_step(num_tokens, self.mesh.dp)
        self._backward_watch.begin_step()
        biases = [(bias, bias.clone()) for bias in expert_biases(self.chunks)]
        output = self.runner.run(micro_batches, loss, replay, observe=observer.observe)
        try:
            observer.record(output)
            if before_update is not None:
                before_update()
            gradients = gradient_tensors(self.chunks)
            self._backward_watch.require_finite(gradients, micro_batches, self.mesh)
        except BaseException:
            for bias, before in biases:  # Megatron changes them when it finishes the gradients
                bias.copy_(before)
            raise
        return output

    def apply_gradients(self, step: AdamStep = AdamStep()) -> tuple[float, float]:  # noqa: B008
        """Do the second half of `train_step`: one optimizer step with the gradients in the buffers.

        Return (norm of the gradients before clipping, learning rate). `step` replaces settings of
        Adam, and the schedule's learning rate, in this step. Raises NotFinite if a gradient is not
        finite.
        """
        with step.applied(self.optimizer):
            groups = self.optimizer.param_groups
            used = float(groups[0]["lr"] if groups else self.scheduler.get_lr({}))
            ok, grad_norm, _ = self.optimizer.step()
        if not ok:
            raise NotFinite("the optimizer refused the step: a gradient is not finite")
        self.scheduler.step(1)
        free_gradient_copies(self.optimizer)
        return float(grad_norm), used

    def zero_gradients(self) -> None:
        """Set the gradient buffers to zero. Raises RuntimeError for a model without an optimizer."""
        self._require_trainable()
        self.require_state()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def statistics(self, output: PassOutput) -> Statistics:
        """Return this rank's part of the losses' statistics; empty on ranks that report no loss."""
        if not self.mesh.reports_loss:
            return {}
        return merge([{**loss.stats, self.loss_key: Sum(loss.loss_sum)} for loss in output.losses])

    def offload_optimizer(self) -> None:
        """Move optimizer and gradients off a GPU, to make room for the engine's weights."""
        self.move_optimizer()
        self.ledger.give_back()

    def offload_parameters(self) -> None:
        """Move the weights off a GPU, to make room for the engine's KV cache."""
        if self.mesh.device.type != "cpu":
            self.ledger.put_away(*self._parameter_kinds)
        self.ledger.give_back()

    def move_optimizer(self) -> None:
        """Move the optimizer state to the host and free the gradients, except on a CPU."""
        self.gather_parameters()
        if self.mesh.device.type != "cpu" and self._optimizer_config is not None:
            self.ledger.put_away(self._prefix + "optimizer", self._prefix + "gradients")

    def onload(self) -> None:
        """Move everything back to the device, after the engine has freed its memory there."""
        self.base.require_mounted(self)
        for kind in (*self.base.kinds, *self.own_kinds):
            if self.ledger.place(kind) != "device":
                self.ledger.to_device(kind)
