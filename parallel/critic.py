"""The critic: a second Megatron model whose last layer gives one value a token, with its own optimizer.

It has the policy's mesh, and its own weights, optimizer and ledger entries (`critic_*`). It
routes natively: its routers are another model's, and the rollout's routes say nothing about them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
from mrl.system.heartbeat import phase
from mrl.types import MicroBatch
from parallel.architectures.base import HfConfig, Rule
from parallel.base import Base, BaseSetup
from parallel.forward import HeadInput, HeadOutput, PassOutput
from parallel.hf_config import HfModel
from parallel.ledger import Ledger
from parallel.megatron_model import MegatronModel
from parallel.mesh import Mesh
from parallel.options.read import read_options

VALUE_HEAD = "value_head.weight"
"""The name of the head in a saved critic's folder; a language model has none, and the head starts
anew."""


class ValueHead(torch.nn.Module):
    """Maps hidden [s, 1, h] to values f32[S, 1, 1], with Megatron's signature of an output layer.

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


def value_rows(given: HeadInput, into: PassOutput) -> HeadOutput:
    """Turn rows [1, n, 1] into values f32[N], noted in `into`: the head of the runner.

    Value t is that of the state before token t was chosen, so it is read off row t - 1; 0 off the loss
    tokens. Row t itself is the value of the state after it.
    """
    wanted = given.batch.loss_mask & (given.batch.position_ids > 0)
    rows = given.context.gather(given.states.flatten().float())
    values = torch.where(wanted, rows.roll(1), 0.0)
    into.values.append(values.detach())
    into.values_after.append(torch.where(given.batch.loss_mask, rows, 0.0).detach())
    return HeadOutput(values)


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


class Critic(MegatronModel):
    """A `Critic` is the model whose output is one value per token.

    What makes it a Megatron model (passes, steps, memory) is `MegatronModel`'s; the value head and its
    weights are the critic's own.
    """

    loss_key = "loss/value"

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
        """Build the critic and load its weights.

        `model`: a language model, or a critic saved under HF names. `ledger`: the policy's own, so
        that one ledger knows every byte of the rank. The head starts as N(0, head_std^2). `megatron`:
        that branch of the recipe.
        """
        options = read_options(megatron)
        setup = BaseSetup(value_model(model), config, recompute, options=options)
        super().__init__(
            Base(setup, mesh, output_layer=partial(ValueHead, std=head_std, seed=seed)),
            value_rows,
            optimizer=optimizer,
            moe=MoeConfig(),
            ledger=ledger,
            prefix="critic_",
            options=options,
        )
        with phase("load:critic"):
            self.load(may_lack=(VALUE_HEAD,))

    def values(self, batches: Sequence[MicroBatch]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values of the states before and after each loss token, without gradient.

        Each is f32[N] per micro-batch on the last pipeline stage; there are none on the others.
        """
        found = self.forward_only(batches, Replay.off)
        return found.values, found.values_after
