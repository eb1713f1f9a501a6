"""Build the models that a recipe trains: the policy, and the critic if the algorithm has one."""

from __future__ import annotations

from typing import Any

from mrl.config import Recipe
from mrl.config.adapter import Adapter
from parallel.critic import Critic
from parallel.hf_config import HfModel
from parallel.lora.weights import lora_setup
from parallel.mesh import Mesh
from parallel.policy import Policy


def make_policy(
    recipe: Recipe,
    model: HfModel,
    mesh: Mesh,
    adapter: Adapter | None,
    *,
    trains: bool,
    reference: HfModel | None = None,
    **shared: Any,
) -> Policy:
    """Build the policy of a recipe and load its weights. The policy gets an optimizer only if
    `trains` is true.

    reference: the frozen reference model; None without a reference. shared: further arguments of
    `Policy`, such as the `base` that several policies share and the policy's `name`.
    """
    return Policy(
        model,
        mesh,
        recipe.model,
        recipe.optimizer if trains else None,
        recompute=recipe.train.recompute,
        temperature=recipe.rollout.temperature,
        reference=reference,
        moe=recipe.moe,
        true_on_policy=recipe.rollout.true_on_policy,
        megatron=recipe.megatron,
        logprob_chunk_tokens=recipe.train.logprob_chunk_tokens,
        mtp_loss_scaling_factor=recipe.train.mtp_loss_scaling_factor,
        lora=lora_setup(adapter, recipe),
        **shared,
    )


def make_critic(model: HfModel | None, recipe: Recipe, policy: Policy, mesh: Mesh) -> Critic | None:
    """Build the critic from `model`, on the policy's device. Returns None if `model` is None."""
    if model is None:
        return None
    lr, optimizer, train = recipe.critic.lr, recipe.optimizer, recipe.train
    # The critic's schedule ends together with the policy's, which begins after the critic's warm-up.
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
