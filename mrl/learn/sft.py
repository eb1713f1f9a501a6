"""Supervised steps before the first rollout, through the same model, packing and train step."""

from __future__ import annotations

import random

import torch

from mrl.algorithms import nll
from mrl.config import OptimizerConfig, WarmStartConfig
from mrl.data import Demonstration
from mrl.learn.batching import make_train_batch
from mrl.preflight import Plan
from mrl.types import LossOutput, MicroBatch, Sample
from parallel.mesh import Mesh
from parallel.policy import Policy


def warm_start(plan: Plan, config: WarmStartConfig, policy: Policy, mesh: Mesh) -> None:
    """`num_steps` optimizer steps of next-token loss on the completions, then a fresh optimizer."""
    recipe = plan.recipe
    samples = [_sample(demonstration) for demonstration in plan.demonstrations]
    order = random.Random(f"warm start/{recipe.seed}")
    policy.reset_optimizer(OptimizerConfig(lr=config.lr))

    def loss(logprobs: torch.Tensor, batch: MicroBatch) -> LossOutput:
        return nll.loss(logprobs, batch, recipe.algorithm)

    for _ in range(config.num_steps):
        chosen = order.sample(samples, config.batch_size)
        batch = make_train_batch(
            chosen, [0.0] * len(chosen), nll, mesh, recipe.train.micro_batch_tokens
        )
        policy.train_step(batch, loss, False)
    policy.reset_optimizer(recipe.optimizer)


def _sample(demonstration: Demonstration) -> Sample:
    """A demonstration as a sample whose completion is the loss."""
    num_tokens = len(demonstration.token_ids)
    return Sample(
        group_id=0,
        token_ids=demonstration.token_ids,
        prompt_len=demonstration.prompt_len,
        loss_mask=torch.arange(num_tokens) >= demonstration.prompt_len,
        rollout_logprobs=torch.zeros(num_tokens),
        weight_versions=(),
        finish_reason="stop",
    )
