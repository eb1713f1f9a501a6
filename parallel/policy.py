"""The policy that trains: model, optimizer and schedules of this rank behind plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moe.routes import Replay
from mrl.config import ModelConfig, MoeConfig, OptimizerConfig
from mrl.system.shared_memory import SharedMemory
from mrl.types import MicroBatch, Statistics, Sum, TrainBatch, WeightBucket
from parallel.export import export_buckets, model_bytes
from parallel.forward import LossFunction, Observe, PassOutput
from parallel.hf_config import HfModel
from parallel.ledger import Ledger, parameter_tensors
from parallel.logprobs import LogprobHead
from parallel.mesh import Mesh
from parallel.options.read import read_options
from parallel.reduce import merge
from parallel.reference import ReferenceWeights
from parallel.sequence_logprobs import sequence_logprobs
from parallel.trained_model import TrainedModel
from parallel.weights import WeightMap


@dataclass(frozen=True)
class StepOutput:
    """One optimizer step; the numbers are the same on every rank unless said otherwise."""

    grad_norm: float
    """Before clipping, over all parameters."""
    lr: float
    stats: Statistics
    """This rank's share, `loss/policy` among them."""
    output: PassOutput
    """What its forward pass gave, under the weights before the step."""


class Policy:
    """A Megatron model with its optimizer. Every method is a collective: call it on all ranks."""

    def __init__(
        self,
        model: HfModel,
        mesh: Mesh,
        config: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        recompute: bool,
        temperature: float,
        reference: HfModel | None = None,
        moe: MoeConfig = MoeConfig(),  # noqa: B008
        true_on_policy: bool = False,
        megatron: Mapping[str, Any] = MappingProxyType({}),
        logprob_chunk_tokens: int = 1024,
    ) -> None:
        """`megatron`: that branch of the recipe."""
        self.mesh = mesh
        self._export_memory = SharedMemory()
        self.ledger = Ledger(mesh.device)
        self.trained = TrainedModel(
            model,
            mesh,
            config,
            LogprobHead(temperature, mesh.tp),
            recompute=recompute,
            distributed_optimizer=optimizer.use_distributed_optimizer,
            moe=moe,
            ledger=self.ledger,
            true_on_policy=true_on_policy,
            options=read_options(megatron),
            logprob_chunk_tokens=logprob_chunk_tokens,
        )
        self._reference: ReferenceWeights | None = None
        if reference is not None:
            WeightMap(reference, mesh, self.chunks).load()
            self._reference = ReferenceWeights(lambda: parameter_tensors(self.chunks))
            self.ledger.own("reference", self._reference.host_tensors, on_host=True)
        self.weights.load()
        self.trained.make_optimizer(optimizer)
        self.runner = self.trained.runner
        self.reset_optimizer = self.trained.make_optimizer
        self._companion: TrainedModel | None = None
        self.offload_parameters = self.trained.offload_parameters

    def share_device(self, companion: TrainedModel) -> None:
        """A critic of the same ledger: it leaves the device before the engine wakes, and returns with
        the policy."""
        self._companion = companion

    def offload_optimizer(self) -> None:
        """As `TrainedModel.offload_optimizer`; of a companion, which no engine reads, all leaves."""
        self.trained.offload_optimizer()
        if self._companion is not None:
            self._companion.offload_optimizer()
            self._companion.offload_parameters()

    def onload(self) -> None:
        """As `TrainedModel.onload`, of the companion too."""
        self.trained.onload()
        if self._companion is not None:
            self._companion.onload()

    @property
    def chunks(self) -> list[Any]:
        return self.trained.chunks

    @property
    def weights(self) -> WeightMap:
        return self.trained.weights

    @property
    def optimizer(self) -> Any:
        return self.trained.optimizer

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The MoE layers of this rank's chunks, Megatron's numbers."""
        return tuple(n for replay in self.runner.replays.values() for n in replay.layers)

    def forward_only(
        self,
        batches: Sequence[MicroBatch],
        replay: Replay,
        observe: Observe | None = None,
    ) -> PassOutput:
        """Return log-probs and entropies under the present weights, without gradient."""
        return self.trained.forward_only(batches, replay, observe=observe)

    def sequence_logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Return the log-probs f32[T] of sequences i64[T] (`parallel.sequence_logprobs`)."""
        return sequence_logprobs(self.trained, self.mesh, sequences)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The frozen reference in the place of the policy; afterwards the policy, bit for bit. Replayed
        choices hold for it too, gate weights do not: they are another model's.

        Raises RuntimeError where the policy was made without one.
        """
        self.ledger.require_on_device("parameters")
        if self._reference is None:
            raise RuntimeError("this policy was made without a reference model")
        self.trained.gather_parameters()
        with self._reference.swapped_in(), self.runner.replaying_gates(False):
            yield

    def train_step(
        self,
        batch: TrainBatch,
        loss: LossFunction,
        replay: Replay,
        before_update: Callable[[], None] | None = None,
    ) -> StepOutput:
        """One optimizer step on the global batch. As `TrainedModel.train_step`."""
        step = self.trained.train_step(batch.micro_batches, loss, replay, before_update)
        stats = self._step_statistics(step.output)
        return StepOutput(step.grad_norm, step.lr, stats, step.output)

    def _step_statistics(self, output: PassOutput) -> Statistics:
        if not self.mesh.reports_loss:
            return dict(output.routing)
        losses = [{**loss.stats, "loss/policy": Sum(loss.loss_sum)} for loss in output.losses]
        return merge([*losses, output.routing])

    def export_bytes(self, dtype: torch.dtype | None = None) -> int:
        """About what `export` sends in all; the same on every rank of a pipeline stage."""
        return model_bytes(self.weights, dtype)

    def export(
        self, version: int, max_bytes: int, dtype: torch.dtype | None = None
    ) -> Iterator[WeightBucket]:
        """The whole model under HF names, cast to `dtype`; every rank must drain the iterator."""
        self.ledger.require_on_device("parameters")
        self.trained.gather_parameters()
        return export_buckets(self.weights, version, max_bytes, self._export_memory, dtype)


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
