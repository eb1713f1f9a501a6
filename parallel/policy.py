"""The policy that trains: model chunks, optimizer and schedules of this rank behind plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

from moe.align import router_rows
from mrl.config import ModelConfig, MoeConfig, OptimizerConfig
from mrl.types import MicroBatch, Statistics, Sum, TrainBatch, WeightBucket
from parallel.balancing import RouterLosses
from parallel.export import export_buckets
from parallel.forward import LossFunction, PassOutput, PipelineRunner, RecordedRoutes
from parallel.groups import Groups
from parallel.hf_config import HfModel
from parallel.implementation import choose_dtype, choose_implementation
from parallel.ledger import Ledger, gradient_tensors, optimizer_tensors, parameter_tensors
from parallel.model import build_chunks, build_config, unwrap
from parallel.optimizer import build_optimizer
from parallel.packing import to_device
from parallel.reduce import merge
from parallel.reference import ReferenceWeights
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
        reference: HfModel | None = None,
        moe: MoeConfig = MoeConfig(),  # noqa: B008
    ) -> None:
        self.groups = groups
        self.implementation, _ = choose_implementation(config.transformer_impl)
        dtype = choose_dtype(config.dtype)
        settings = build_config(
            model, groups, dtype, self.implementation, recompute, moe.expert_bias_update_rate
        )
        # The loss carries its own normaliser; Megatron would divide by the number of tokens.
        settings.finalize_model_grads_func = lambda chunks, num_tokens=None, **kw: (
            finalize_model_grads(chunks, None, **kw)
        )
        self.chunks = build_chunks(
            model, groups, settings, self.implementation, optimizer.use_distributed_optimizer
        )
        self.weights = WeightMap(model, groups, self.chunks)
        self._reference: ReferenceWeights | None = None
        if reference is not None:
            # Before the optimizer, which takes its fp32 copies from the weights that train.
            WeightMap(reference, groups, self.chunks).load()
            self._reference = ReferenceWeights(lambda: parameter_tensors(self.chunks))
        self.weights.load()
        self.router_losses = RouterLosses(moe, map(unwrap, self.chunks))
        self.runner = PipelineRunner(
            self.chunks, groups, temperature, recompute, self.router_losses
        )
        self.optimizer, self.scheduler = build_optimizer(optimizer, self.chunks, dtype)
        settings.grad_scale_func = self.optimizer.scale_loss
        self.ledger = Ledger(groups.device)
        self.ledger.own("parameters", lambda: parameter_tensors(self.chunks))
        self.ledger.own("gradients", lambda: gradient_tensors(self.chunks), disposable=True)
        self.ledger.own("optimizer", lambda: optimizer_tensors(self.optimizer))
        if self._reference is not None:
            self.ledger.own("reference", self._reference.host_tensors, on_host=True)

    def logprobs(self, batches: Sequence[MicroBatch], replay: RecordedRoutes | bool) -> PassOutput:
        """Log-probs and entropies under the present weights, without gradients."""
        self.ledger.require_on_device("parameters")
        for chunk in self.chunks:
            chunk.eval()
        return self.runner.run([to_device(b, self.groups.device) for b in batches], None, replay)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The frozen reference in the place of the policy; afterwards the policy, bit for bit.

        Raises RuntimeError where the policy was made without one.
        """
        self.ledger.require_on_device("parameters")
        if self._reference is None:
            raise RuntimeError("this policy was made without a reference model")
        with self._reference.swapped_in():
            yield

    def train_step(
        self, batch: TrainBatch, loss: LossFunction, replay: RecordedRoutes | bool
    ) -> StepOutput:
        """One optimizer step on the global batch.

        Raises RuntimeError, with the weights untouched, when a gradient is not finite.
        """
        self.ledger.require_on_device("parameters", "gradients", "optimizer")
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [to_device(b, self.groups.device) for b in batch.micro_batches]
        counted = [router_rows(b, slice(None)).counted.sum() for b in batches]
        self.router_losses.begin_step(torch.stack(counted).sum(), self.groups.dp)
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
        self.ledger.require_on_device("parameters")
        return export_buckets(self.weights, version, max_bytes)

    def offload_optimizer(self) -> None:
        """Make room for the engine's weights; on a CPU there is one memory, and nothing moves."""
        if self.groups.device.type == "cpu":
            return
        if self.ledger.place("optimizer") == "device":
            self.ledger.to_host("optimizer")
        if self.ledger.place("gradients") == "device":
            self.ledger.free("gradients")

    def offload_parameters(self) -> None:
        """Make room for the engine's KV cache, once the weights are sent."""
        if self.groups.device.type != "cpu" and self.ledger.place("parameters") == "device":
            self.ledger.to_host("parameters")

    def onload(self) -> None:
        """Take the memory back after the engine went to sleep; what never left stays."""
        for kind in ("parameters", "gradients", "optimizer"):
            if self.ledger.place(kind) != "device":
                self.ledger.to_device(kind)

    def state_dict(self) -> dict[str, Any]:
        """This rank's weights, optimizer and learning-rate schedule."""
        return {
            "model": [
                {name: p.detach() for name, p in chunk.named_parameters()} for chunk in self.chunks
            ],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, for the same layout."""
        for chunk, saved in zip(self.chunks, state["model"], strict=True):
            own = dict(chunk.named_parameters())
            if own.keys() != saved.keys():
                raise ValueError(f"checkpoint: parameters differ: {own.keys() ^ saved.keys()}")
            for name, parameter in own.items():
                parameter.copy_(saved[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def reset_optimizer(self, config: OptimizerConfig) -> None:
        """Forget moments and learning-rate schedule and start over with `config`."""
        self.ledger.require_on_device("optimizer")
        dtype = get_model_config(self.chunks[0]).params_dtype
        self.optimizer, self.scheduler = build_optimizer(config, self.chunks, dtype)
        get_model_config(self.chunks[0]).grad_scale_func = self.optimizer.scale_loss


def with_old_logprobs(batches: Sequence[MicroBatch], output: PassOutput) -> list[MicroBatch]:
    """The micro-batches with what the trainer computed before the update (last stage only)."""
    return _with_field("old_logprobs", batches, output)


def with_ref_logprobs(batches: Sequence[MicroBatch], output: PassOutput) -> list[MicroBatch]:
    """The micro-batches with what the frozen reference gives them (last stage only)."""
    return _with_field("ref_logprobs", batches, output)


def _with_field(name: str, batches: Sequence[MicroBatch], output: PassOutput) -> list[MicroBatch]:
    if not output.logprobs:
        return list(batches)
    return [
        dataclasses.replace(batch, **{name: logprobs})
        for batch, logprobs in zip(batches, output.logprobs, strict=True)
    ]
