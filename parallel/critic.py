"""The critic: a second Megatron model whose last layer gives one value a token, with its own optimizer.

It has the policy's mesh, and its own weights, optimizer and ledger entries (`critic_*`). It
routes natively: its routers are another model's, and the rollout's routes say nothing about them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moe.routes import Replay
from mrl.config import ModelConfig, MoeConfig, OptimizerConfig
from mrl.types import MicroBatch, Statistics, Sum, TrainBatch
from parallel.architectures.base import HfConfig, Rule
from parallel.forward import HeadInput, LossFunction, PassOutput
from parallel.hf_config import HfModel
from parallel.ledger import Ledger
from parallel.mesh import Mesh
from parallel.options.read import read_options
from parallel.policy import StepOutput
from parallel.reduce import merge
from parallel.trained_model import TrainedModel

VALUE_HEAD = "value_head.weight"
"""Under this name a saved critic has its head; a language model has none, and the head starts anew."""


class ValueHead(torch.nn.Module):
    """hidden [s, 1, h] -> values f32[S, 1, 1], with Megatron's signature of an output layer.

    The weight [1, h] is whole on every rank. Under sequence parallelism a rank has s = S / tp rows, and
    the values of all are gathered: afterwards every rank computes the same loss of them.
    """

    def __init__(self, config: TransformerConfig, std: float, seed: int) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        # The same on all ranks: drawn on the CPU, from a generator of its own.
        noise = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(seed))
        self.weight = torch.nn.Parameter((std * noise).to(config.params_dtype))
        # Each rank has the gradient of its own rows only: Megatron sums those of flagged weights.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: Tensor, weight: Any = None, **_: Any) -> tuple[Tensor, None]:
        values = F.linear(hidden, self.weight).float()
        if self.sequence_parallel:
            # All ranks hold the same gradient of the whole: each takes its rows, without a sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def value_rows(given: HeadInput, into: PassOutput) -> Tensor:
    """The head of the runner: rows [1, n, 1] -> values f32[N], noted in `into`.

    Value t is that of the state before token t was chosen, so it is read off row t - 1; 0 off the loss
    tokens.
    """
    wanted = given.batch.loss_mask & (given.batch.position_ids > 0)
    rows = given.context.gather(given.states.flatten().float())
    values = torch.where(wanted, rows.roll(1), 0.0)
    into.values.append(values.detach())
    return values


def value_model(model: HfModel) -> HfModel:
    """`model` with a value head in the place of its output layer, which nothing is tied to."""

    def rules(hf: HfConfig) -> list[Rule]:
        table = [r for r in model.architecture.rules(hf) if r.megatron != "output_layer.weight"]
        return [*table, Rule("output_layer.weight", (VALUE_HEAD,))]

    def unread(hf: HfConfig) -> dict[str, str]:
        return {**model.architecture.unread(hf), "lm_head.": "a critic has a value head instead"}

    return dataclasses.replace(
        model,
        config={**model.config, "tie_word_embeddings": False},
        architecture=dataclasses.replace(model.architecture, rules=rules, unread=unread),
    )


class Critic:
    """Values and their training. Every method but the moves is a collective."""

    def __init__(
        self,
        model: HfModel,
        mesh: Mesh,
        config: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        recompute: bool,
        ledger: Ledger,
        head_std: float = 0.0,
        seed: int = 0,
        megatron: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`model`: a language model, or a critic saved under HF names. `ledger`: the policy's own, so
        that one ledger knows every byte of the rank. The head starts as N(0, head_std^2). `megatron`:
        that branch of the recipe."""
        self.mesh = mesh
        self.trained = TrainedModel(
            value_model(model),
            mesh,
            config,
            value_rows,
            recompute=recompute,
            distributed_optimizer=optimizer.use_distributed_optimizer,
            moe=MoeConfig(),
            ledger=ledger,
            prefix="critic_",
            output_layer=partial(ValueHead, std=head_std, seed=seed),
            options=read_options(megatron),
        )
        self.trained.weights.load(may_lack=(VALUE_HEAD,))
        self.trained.make_optimizer(optimizer)
        self.offload_optimizer = self.trained.offload_optimizer
        self.offload_parameters = self.trained.offload_parameters
        self.onload = self.trained.onload

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """f32[N] a micro-batch on the last pipeline stage, none on the others; no gradients."""
        return self.trained.forward_only(batches, Replay.off).values

    def train_step(
        self,
        batch: TrainBatch,
        loss: LossFunction,
        before_update: Callable[[], None] | None = None,
    ) -> StepOutput:
        """One optimizer step; `loss` gets the values f32[N] with gradient. Reports `loss/value`.

        `before_update` may raise, on all ranks or on none. Raises RunFailed, with the weights
        untouched, when a gradient is not finite.
        """
        step = self.trained.train_step(batch.micro_batches, loss, Replay.off, before_update)
        stats: Statistics = {}
        if self.mesh.reports_loss:
            losses = step.output.losses
            stats = merge([{**each.stats, "loss/value": Sum(each.loss_sum)} for each in losses])
        return StepOutput(step.grad_norm, step.lr, stats, step.output)
