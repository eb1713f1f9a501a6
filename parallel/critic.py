"""The critic: a second Megatron model, whose last layer gives one value per token.

It shares the policy's mesh, and has separate weights, a separate optimizer and separate ledger
entries (`critic_*`). Its routers choose experts themselves, because the routes of a rollout belong
to the policy's routers.
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
from parallel.heads import HeadInput, HeadOutput
from parallel.hf_config import HfModel
from parallel.ledger import Ledger
from parallel.megatron_model import MegatronModel
from parallel.mesh import Mesh
from parallel.options.read import read_options
from parallel.pass_output import PassOutput

VALUE_HEAD = "value_head.weight"
"""The name of the value head in the folder of a saved critic. If the critic starts from a language
model, whose folder has no value head, the head is initialized randomly."""


class ValueHead(torch.nn.Module):
    """An output layer in Megatron's form, which gives one value per row: it maps this rank's hidden
    states [s, 1, h] to the values f32[S, 1, 1] of all S rows.

    Every rank holds the whole weight [1, h]. Without sequence parallelism a rank has all rows, so s
    = S. With sequence parallelism it has s = S / tp rows; the values of the tp ranks are gathered,
    and each of these ranks computes the same loss from them.
    """

    def __init__(self, config: TransformerConfig, std: float, seed: int) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        # Made on the CPU with a separate generator, so that it is the same on all ranks.
        noise = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(seed))
        self.weight = torch.nn.Parameter((std * noise).to(config.params_dtype))
        # Each rank has the gradient of its own rows only; Megatron sums gradients of flagged weights.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: Tensor, weight: Any = None, **_: Any) -> tuple[Tensor, None]:
        values = F.linear(hidden, self.weight).float()
        if self.sequence_parallel:
            # All ranks hold the same gradient of all values: each takes its rows, without a sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def value_rows(given: HeadInput, into: PassOutput) -> HeadOutput:
    """Turn the model's output [1, n, 1] into values f32[N], and record them in `into`. This is the
    critic's head.

    Value t is that of the state before token t was chosen, so it comes from row t - 1 of the output.
    Row t gives the value of the state after token t, which goes to `into.values_after`. Both values
    are 0 for tokens without loss.
    """
    wanted = given.batch.loss_mask & (given.batch.position_ids > 0)
    rows = given.context.gather(given.states.flatten().float())
    values = torch.where(wanted, rows.roll(1), 0.0)
    into.values.append(values.detach())
    into.values_after.append(torch.where(given.batch.loss_mask, rows, 0.0).detach())
    return HeadOutput(values)


def value_model(model: HfModel) -> HfModel:
    """Return `model` with a value head, which is not tied to the embedding, in place of the output
    layer."""

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
    """The model that gives one value per token.

    Passes, steps and memory moves are inherited from `MegatronModel`; this class adds the value
    head.
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

        `model` is a language model, or a critic that was saved under HF names. `ledger` is the
        policy's ledger, so that one ledger accounts for every byte of the rank. The weights of a
        new value head are drawn from N(0, head_std^2) with `seed`. `megatron` is the recipe's
        section of that name.
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
        """Return two lists of values, without gradient. For each loss token, the first list has the
        value of the state before the token, and the second the value of the state after it.

        On the last pipeline stage, each list has one tensor f32[N] per micro-batch, with 0 at
        tokens without loss. On other stages the lists are empty.
        """
        found = self.forward_only(batches, Replay.off)
        return found.values, found.values_after
