"""Builds the critic of a run."""

from __future__ import annotations

from mrl.config import Recipe
from parallel.critic import Critic
from parallel.hf_config import HfModel
from parallel.mesh import Mesh
from parallel.policy import Policy


def make_critic(model: HfModel | None, recipe: Recipe, policy: Policy, mesh: Mesh) -> Critic | None:
    """Build the critic from `model`, sharing the policy's device; None where there is no `model`."""
    if model is None:
        return None
    lr, optimizer, train = recipe.critic.lr, recipe.optimizer, recipe.train
    # Its schedule ends with the policy's, which begins when the critic has warmed up.
    warmup = recipe.critic.warmup_steps * train.num_epochs_per_rollout * train.num_steps_per_rollout
    decay = optimizer.lr_decay_steps and optimizer.lr_decay_steps + warmup
    critic = Critic(
        model,
        mesh,
        recipe.model,
        optimizer.model_copy(
            update={
                "lr": lr,
                "min_lr": optimizer.min_lr / optimizer.lr * lr,
                "lr_decay_steps": decay,
            }
        ),
        recompute=recipe.train.recompute,
        ledger=policy.ledger,
        head_std=recipe.critic.head_std,
        seed=recipe.seed,
        megatron=recipe.megatron,
    )
    policy.share_device(critic)
    return critic
