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
from parallel.forward import PassOutput
from parallel.hf_config import HfModel
from parallel.ledger import Bytes, Ledger, parameter_tensors
from parallel.logprobs import LogprobHead
from parallel.lora.shared_base import KIND, SharedBase, SwapReport
from parallel.lora.weights import LoraSetup
from parallel.megatron_model import MegatronModel
from parallel.mesh import Mesh
from parallel.options.read import read_options
from parallel.reduce import merge
from parallel.reference import ReferenceWeights
from parallel.sequence_logprobs import sequence_logprobs
from parallel.weights import WeightMap


class Policy(MegatronModel):
    """A `Policy` is the model that generates: its output is log-probs.

    What makes it a Megatron model (passes, steps, memory) is `MegatronModel`'s; the frozen reference,
    the export to engines and the log-probs of whole sequences are the policy's own.
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
        lora: LoraSetup | None = None,
        base: SharedBase | None = None,
        name: str = "",
    ) -> None:
        """Build the policy and load its weights.

        `optimizer`: None for evaluation; the policy then holds its weights and nothing else.
        `megatron`: that branch of the recipe. `lora`: the adapter that is trained; the reference is
        then the base, without a copy of it, and `reference` must be `model`. `base`: what it is made
        over, together with other policies; it is mounted then, and its `name` is its own among them.

        Raises InputError where it cannot share that base; the others are then as before.
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
        """Move a critic of the same ledger along: it leaves the device before the engine wakes, and
        returns with the policy."""
        self._companion = companion

    def move_optimizer(self) -> None:
        """Move optimizer and gradients to the host, and all of a companion, as no engine reads it."""
        super().move_optimizer()
        if self._companion is not None:
            self._companion.move_optimizer()
            if self.mesh.device.type != "cpu":
                self.ledger.put_away(*self._companion.own_kinds)

    def onload(self) -> None:
        """Take the memory back after the engine went to sleep, for the companion too."""
        super().onload()
        if self._companion is not None:
            self._companion.onload()

    def mount(self, *, adapter_only: bool = False) -> SwapReport:
        """Put this policy into the base that it shares (`SharedBase.mount`)."""
        return self._shared_base().mount(self, adapter_only=adapter_only)

    def unmount(self) -> SwapReport:
        """Take this policy out of the base that it shares; all of it moves to the host.

        Raises RuntimeError where another policy is mounted.
        """
        base = self._shared_base()
        base.require_mounted(self)
        return base.unmount()

    def where(self) -> dict[str, Bytes]:
        """Return every byte of the ledger by kind, without those of other policies, as if this one had
        its base for itself: the bytes of the base count among the `parameters`."""
        found = self.ledger.where()
        if self._shared is None:
            return found
        own = {kind.rpartition("/")[2]: found[kind] for kind in self.own_kinds}
        both = zip(own["parameters"], found[KIND], strict=True)
        return own | {"parameters": Bytes(*(a + b for a, b in both))}

    def _shared_base(self) -> SharedBase:
        if self._shared is None:
            raise RuntimeError("this policy shares its base with no other: it is always mounted")
        return self._shared

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The MoE layers of this rank's chunks, Megatron's numbers."""
        return tuple(n for replay in self.runner.replays.values() for n in replay.layers)

    def sequence_logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Return the log-probs f32[T] of sequences i64[T] (`parallel.sequence_logprobs`)."""
        return sequence_logprobs(self, sequences)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Put the frozen reference in the place of the policy; afterwards the policy returns, bit for
        bit. Replayed choices hold for it too, gate weights do not: they are another model's. The
        reference of an adapter is the model with the adapter turned off.

        Raises RuntimeError where the policy was made without one.
        """
        self.require_parameters()
        if not self._has_reference:
            raise RuntimeError("this policy was made without a reference model")
        self.gather_parameters()
        swapped = nullcontext() if self._reference is None else self._reference.swapped_in()
        adapter_off = nullcontext() if self.lora is None else self.lora.off()
        with swapped, adapter_off, self.runner.replaying_gates(False):
            yield

    def statistics(self, output: PassOutput) -> Statistics:
        return merge([super().statistics(output), output.routing])

    def export_bytes(self, dtype: torch.dtype | None = None) -> int:
        """About what `export` sends in all; the same on every rank of a pipeline stage."""
        return model_bytes(self._exported, dtype)

    def export(
        self, version: int, max_bytes: int, dtype: torch.dtype | None = None
    ) -> Iterator[WeightBucket]:
        """Yield the whole model under HF names, or the adapter under PEFT's, cast to `dtype`.

        A collective: every rank must drain the iterator.
        """
        merged = self.lora is not None and self.lora.setup.merged
        if merged or self.lora is None:
            self.require_parameters()
        else:  # the base may be away
            self.ledger.require_on_device(self._prefix + "parameters")
        self.gather_parameters()
        return export_buckets(
            self._exported, version, max_bytes, self._export_memory, dtype, merged=merged
        )

    @property
    def _exported(self) -> WeightMap:
        """What an export sends: an adapter alone, unless it is merged."""
        return self.weights if self.lora is None or self.lora.setup.merged else self.trained


def with_old_logprobs(batches: Sequence[MicroBatch], output: PassOutput) -> list[MicroBatch]:
    """Return the micro-batches with `old_logprobs`, from a pass before the update (last stage only)."""
    return _with_field("old_logprobs", batches, output)


def with_rollout_as_old(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return the micro-batches with the engine's log-probs as `old_logprobs`."""
    return [dataclasses.replace(b, old_logprobs=b.rollout_logprobs) for b in batches]


def with_ref_logprobs(batches: Sequence[MicroBatch], output: PassOutput) -> list[MicroBatch]:
    """Return the micro-batches with `ref_logprobs`, from a pass of the reference (last stage only)."""
    return _with_field("ref_logprobs", batches, output)


def _with_field(name: str, batches: Sequence[MicroBatch], output: PassOutput) -> list[MicroBatch]:
    if not output.logprobs:
        return list(batches)
    return [
        dataclasses.replace(batch, **{name: logprobs})
        for batch, logprobs in zip(batches, output.logprobs, strict=True)
    ]
