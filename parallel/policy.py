"""The policy that trains: model chunks, optimizer and schedules of this rank behind plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

from mrl.config import ModelConfig, OptimizerConfig
from mrl.types import MicroBatch, Statistics, Sum, TrainBatch, WeightBucket
from parallel.export import export_buckets
from parallel.forward import LossFunction, PassOutput, PipelineRunner, RecordedRoutes
from parallel.groups import Groups
from parallel.hf_config import HfModel
from parallel.implementation import choose_dtype, choose_implementation
from parallel.model import build_chunks, build_config
from parallel.offload import HostOffload
from parallel.optimizer import build_optimizer
from parallel.packing import to_device
from parallel.reduce import merge
from parallel.weights import WeightMap


@dataclass(frozen=True)
class StepOutput:
    """One optimizer step; the numbers are the same on every rank unless said otherwise."""

    grad_norm: float
    """Before clipping, over all parameters."""
    lr: float
    stats: Statistics
    """This rank's share, `loss/policy` among them."""


class Policy:
    """A Megatron model with its optimizer. Every method is a collective: call it on all ranks."""

    def __init__(
        self,
        model: HfModel,
        groups: Groups,
        config: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        recompute: bool,
        temperature: float,
    ) -> None:
        self.groups = groups
        self.implementation, _ = choose_implementation(config.transformer_impl)
        dtype = choose_dtype(config.dtype)
        settings = build_config(model, groups, dtype, self.implementation, recompute)
        # The loss carries its own normaliser; Megatron would divide by the number of tokens.
        settings.finalize_model_grads_func = lambda chunks, num_tokens=None, **kw: (
            finalize_model_grads(chunks, None, **kw)
        )
        self.chunks = build_chunks(
            model, groups, settings, self.implementation, optimizer.use_distributed_optimizer
        )
        self.weights = WeightMap(model, groups, self.chunks)
        self.weights.load()
        self.runner = PipelineRunner(self.chunks, groups, temperature, recompute)
        self.optimizer, self.scheduler = build_optimizer(optimizer, self.chunks, dtype)
        settings.grad_scale_func = self.optimizer.scale_loss
        self.host = HostOffload()

    def logprobs(self, batches: Sequence[MicroBatch], replay: RecordedRoutes | bool) -> PassOutput:
        """Log-probs and entropies under the present weights, without gradients."""
        for chunk in self.chunks:
            chunk.eval()
        return self.runner.run([to_device(b, self.groups.device) for b in batches], None, replay)

    def train_step(
        self, batch: TrainBatch, loss: LossFunction, replay: RecordedRoutes | bool
    ) -> StepOutput:
        """One optimizer step on the global batch.

        Raises RuntimeError, with the weights untouched, when a gradient is not finite.
        """
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [to_device(b, self.groups.device) for b in batch.micro_batches]
        output = self.runner.run(batches, loss, replay)
        lr = float(self.optimizer.param_groups[0]["lr"])
        ok, grad_norm, _ = self.optimizer.step()
        if not ok:
            raise RuntimeError("the optimizer refused the step: a gradient is not finite")
        self.scheduler.step(1)
        return StepOutput(float(grad_norm), lr, self._step_statistics(output))

    def _step_statistics(self, output: PassOutput) -> Statistics:
        if not self.groups.reports_loss:
            return dict(output.routing)
        losses = [{**loss.stats, "loss/policy": Sum(loss.loss_sum)} for loss in output.losses]
        return merge([*losses, output.routing])

    def export(self, version: int, max_bytes: int) -> Iterator[WeightBucket]:
        """The whole model under HF names; every rank must drain the iterator."""
        return export_buckets(self.weights, version, max_bytes)

    def offload_optimizer(self) -> None:
        """Make room for the engine's weights; on a CPU there is one memory, and nothing moves."""
        if self.groups.device.type != "cpu":
            self.host.offload_optimizer(self.chunks, self.optimizer)

    def offload_parameters(self) -> None:
        """Make room for the engine's KV cache, once the weights are sent."""
        if self.groups.device.type != "cpu":
            self.host.offload_parameters(self.chunks)

    def onload(self) -> None:
        """Take the memory back after the engine went to sleep."""
        self.host.onload()

    def reset_optimizer(self, config: OptimizerConfig) -> None:
        """Forget moments and learning-rate schedule and start over with `config`."""
        dtype = get_model_config(self.chunks[0]).params_dtype
        self.optimizer, self.scheduler = build_optimizer(config, self.chunks, dtype)
        get_model_config(self.chunks[0]).grad_scale_func = self.optimizer.scale_loss


def with_old_logprobs(batches: Sequence[MicroBatch], output: PassOutput) -> list[MicroBatch]:
    """The micro-batches with what the trainer computed before the update (last stage only)."""
    if not output.logprobs:
        return list(batches)
    return [
        dataclasses.replace(batch, old_logprobs=logprobs)
        for batch, logprobs in zip(batches, output.logprobs, strict=True)
    ]
