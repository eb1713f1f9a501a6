"""The policy: the model that is trained with RL, exported to the engines, or only evaluated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mrl.config import ModelConfig, MoeConfig, OptimizerConfig
from mrl.system.shared_memory import SharedMemory
from mrl.types import MicroBatch, Statistics, WeightBucket
from parallel.base import Base, BaseSetup
from parallel.export import export_buckets, model_bytes
from parallel.hf_config import HfModel
from parallel.ledger import Bytes, Ledger, parameter_tensors
from parallel.logprobs import LogprobHead, sequence_logprobs
from parallel.lora.shared_base import KIND, SharedBase, SwapReport
from parallel.lora.weights import LoraSetup
from parallel.megatron_model import MegatronModel
from parallel.mesh import Mesh
from parallel.mtp import MtpLoss
from parallel.options.read import read_options
from parallel.pass_output import PassOutput
from parallel.quantized import FakeQuantize, fake_quantized
from parallel.reduce import merge
from parallel.reference import ReferenceWeights
from parallel.weights import WeightMap

BUCKET_BYTES = 256 << 20
"""The size in bytes of the buckets in which weights are gathered for `Policy.fake_quantized`."""


class Policy(MegatronModel):
    """The language model that is trained or evaluated. Its passes return log-probs.

    Passes, steps and memory moves are inherited from `MegatronModel`. This class adds the frozen
    reference, the export to engines and the log-probs of whole sequences.
    """

    loss_key = "loss/policy"

    def __init__(
        self,
        model: HfModel,
        mesh: Mesh,
        config: ModelConfig,
        optimizer: OptimizerConfig | None,
        *,
        recompute: bool,
        temperature: float,
        reference: HfModel | None = None,
        moe: MoeConfig = MoeConfig(),  # noqa: B008
        true_on_policy: bool = False,
        megatron: Mapping[str, Any] = MappingProxyType({}),
        logprob_chunk_tokens: int = 1024,
        mtp_loss_scaling_factor: float = 0.0,
        lora: LoraSetup | None = None,
        base: SharedBase | None = None,
        name: str = "",
    ) -> None:
        """Build the policy and load its weights.

        `optimizer` is None for evaluation; the policy then has no gradients or optimizer state.
        `reference` is the frozen reference; None if there is no reference. `megatron` is the recipe's
        section of that name. `mtp_loss_scaling_factor` is that of the recipe; without MTP layers in
        `model` it has no effect. If `lora` is given, only the adapter that it describes is trained. The
        reference is then the model without the adapter, which needs no copy, and `reference` must be
        `model` or None. `base` is a base that the policy shares with other policies; building the
        policy also mounts it on this base. `name` must differ from the names of the other policies on
        the base.

        Raises InputError if the policy cannot share that base; the other policies are then
        unchanged.
        """
        options = read_options(megatron)
        setup = BaseSetup(
            model, config, recompute, moe, true_on_policy, options, logprob_chunk_tokens,
            is_adapted=lora is not None,
        )  # fmt: skip
        if base is not None:
            base.setup.require_same(setup)
        self._export_memory = SharedMemory()
        self._companion: MegatronModel | None = None
        self._reference: ReferenceWeights | None = None
        self._has_reference = reference is not None
        self._shared = base
        try:
            super().__init__(
                base or Base(setup, mesh),
                LogprobHead(temperature, mesh.tp),
                optimizer=optimizer,
                moe=moe,
                ledger=Ledger(mesh.device) if base is None else base.ledger,
                name=name,
                prefix=f"{name}/" if name else "",
                options=options,
                lora=lora,
            )
            if num_mtp := model.architecture.num_trained_mtp:
                self.runner.extra_loss = MtpLoss(
                    self.chunks, mesh, num_mtp, mtp_loss_scaling_factor, self.gather_parameters
                )
            if reference is not None and lora is None:
                WeightMap(reference, mesh, self.chunks).load()
                self._reference = ReferenceWeights(lambda: parameter_tensors(self.chunks))
                self.ledger.own("reference", self._reference.host_tensors, on_host=True)
            self.load()
        except BaseException:
            if base is not None and base.mounted is self:
                self.close()
            raise

    def share_device(self, companion: MegatronModel) -> None:
        """Let later moves of this policy also move `companion`, a critic with the same memory ledger.

        The critic leaves the device before the engine needs the memory, and returns with the policy.
        """
        self._companion = companion

    def move_optimizer(self) -> None:
        """Move the optimizer state to the host and free the gradients. Also move the
        companion (the critic given to `share_device`) completely, with its weights, because no engine
        reads them. On a CPU nothing moves."""
        super().move_optimizer()
        if self._companion is not None:
            self._companion.move_optimizer()
            if self.mesh.device.type != "cpu":
                self.ledger.put_away(*self._companion.own_kinds)

    def onload(self) -> None:
        """Move the policy and its companion, if any, back to the device, after the engine has freed
        its memory there."""
        super().onload()
        if self._companion is not None:
            self._companion.onload()

    def mount(self, *, adapter_only: bool = False) -> SwapReport:
        """Mount this policy on the base that it shares (see `SharedBase.mount`).

        Raises RuntimeError if the policy shares no base.
        """
        return self._shared_base().mount(self, adapter_only=adapter_only)

    def unmount(self) -> SwapReport:
        """Unmount this policy from the base that it shares (see `SharedBase.unmount`).

        Raises RuntimeError if the policy is not mounted, or shares no base.
        """
        base = self._shared_base()
        base.require_mounted(self)
        return base.unmount()

    def where(self) -> dict[str, Bytes]:
        """Return, for each kind of memory (such as `parameters` or `optimizer`), how many bytes this
        rank has on the device, on the host, and freed (see `parallel.ledger.Bytes`).

        If the policy shares its base, only this policy's kinds are returned, and `parameters` also
        counts the base, as if it belonged to this policy. Otherwise the kinds of a critic are
        returned too.
        """
        found = self.ledger.where()
        if self._shared is None:
            return found
        own = {kind.rpartition("/")[2]: found[kind] for kind in self.own_kinds}
        both = zip(own["parameters"], found[KIND], strict=True)
        return own | {"parameters": Bytes(*(a + b for a, b in both))}

    def _shared_base(self) -> SharedBase:
        if self._shared is None:
            raise RuntimeError("this policy does not share its base, so it is always mounted")
        return self._shared

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Megatron's 1-based numbers of the MoE layers in this rank's chunks."""
        return tuple(n for replay in self.runner.replays.values() for n in replay.layers)

    def sequence_logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Return the log-probs f32[T] of each sequence i64[T] (see
        `parallel.logprobs.sequence_logprobs`)."""
        return sequence_logprobs(self, sequences)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Context manager. In its `with` statement the model computes with the weights of the frozen
        reference.

        Afterwards the policy's weights are restored bit for bit. If a pass of the reference replays
        routes, it uses the replayed experts with the reference's own gate weights. With an adapter, the
        reference is the model with the adapter turned off.

        Raises RuntimeError if the policy was made without a reference.
        """
        self.require_parameters()
        if not self._has_reference:
            raise RuntimeError("this policy was made without a reference model")
        self.gather_parameters()
        swapped = nullcontext() if self._reference is None else self._reference.swapped_in()
        adapter_off = nullcontext() if self.lora is None else self.lora.off()
        with swapped, adapter_off, self.runner.replaying_gates(False):
            yield

    def snapshot(self) -> ReferenceWeights:
        """Return a host copy of the weights that are trained, which can replace them later. A
        collective; these weights must be on the device."""
        self.ledger.require_on_device(self._prefix + "parameters")
        self.gather_parameters()
        return ReferenceWeights(lambda: [entry.parameter for entry in self.trained.entries])

    @contextmanager
    def fake_quantized(
        self, fake_quantize: FakeQuantize, dtype: torch.dtype | None
    ) -> Iterator[None]:
        """Context manager. In its `with` statement the weights have the values that an engine with
        quantised weights holds (see `parallel.quantized.fake_quantized`). `dtype` is the dtype of the
        export. A collective."""
        self.require_parameters()
        self.gather_parameters()
        memory = self._export_memory
        weights = self.weights.without_mtp()
        with fake_quantized(weights, fake_quantize, BUCKET_BYTES, memory, dtype):
            yield

    def statistics(self, output: PassOutput) -> Statistics:
        return merge([super().statistics(output), output.routing])

    def export_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Estimate the number of bytes that `export` sends. The estimate is the same on every
        rank of a pipeline stage."""
        return model_bytes(self._exported, dtype)

    def export(
        self, version: int, max_bytes: int, dtype: torch.dtype | None = None
    ) -> Iterator[WeightBucket]:
        """Return an iterator over the buckets of the whole model under HF names, or of the adapter
        under PEFT's names, cast to `dtype` (see `export_buckets`).

        A collective: every rank must exhaust the iterator.
        """
        merged = self.lora is not None and self.lora.setup.merged
        if merged or self.lora is None:
            self.require_parameters()
        else:  # the base need not be on the device
            self.ledger.require_on_device(self._prefix + "parameters")
        self.gather_parameters()
        return export_buckets(
            self._exported, version, max_bytes, self._export_memory, dtype, merged=merged
        )

    @property
    def _exported(self) -> WeightMap:
        """The parameters that an export sends: the whole model's, or an unmerged adapter's. Engines
        have no MTP layers, because they do not decode speculatively."""
        whole = self.lora is None or self.lora.setup.merged
        return self.weights.without_mtp() if whole else self.trained


def with_old_logprobs(batches: Sequence[MicroBatch], output: PassOutput) -> list[MicroBatch]:
    """Return the micro-batches with `old_logprobs` from the output of a pass before the update. Only
    the last pipeline stage has log-probs; on other stages the micro-batches are unchanged."""
    return _with_field("old_logprobs", batches, output)


def with_rollout_as_old(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return the micro-batches with the engine's log-probs as `old_logprobs`."""
    return [dataclasses.replace(b, old_logprobs=b.rollout_logprobs) for b in batches]


def with_ref_logprobs(batches: Sequence[MicroBatch], output: PassOutput) -> list[MicroBatch]:
    """Return the micro-batches with `ref_logprobs` from the output of a reference pass. Only
    the last pipeline stage has log-probs; on other stages the micro-batches are unchanged."""
    return _with_field("ref_logprobs", batches, output)


def _with_field(name: str, batches: Sequence[MicroBatch], output: PassOutput) -> list[MicroBatch]:
    if not output.logprobs:
        return list(batches)
    return [
        dataclasses.replace(batch, **{name: logprobs})
        for batch, logprobs in zip(batches, output.logprobs, strict=True)
    ]
