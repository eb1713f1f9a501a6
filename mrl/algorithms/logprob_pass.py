"""Decides whether a step needs a log-prob pass: a forward pass of the policy, before the update and
separate from the training pass, that computes the log-probs of the step's tokens."""

from __future__ import annotations

from mrl.algorithms.base import Algorithm, traits
from mrl.config import Recipe


def update_can_serve(recipe: Recipe) -> bool:
    """Return whether the log-probs of the policy's training pass can serve as the old log-probs.

    They can if a rollout has a single optimizer step, because the training pass then uses the weights
    from before the update. They cannot if `guards.min_ess` is set: this guard may skip a step, and a
    skipped step has mismatch metrics only if there is a separate pass.
    """
    train = recipe.train
    takes_one = train.num_steps_per_rollout * train.num_epochs_per_rollout == 1
    return takes_one and recipe.guards.min_ess is None


def needs_logprob_pass(recipe: Recipe, algorithm: Algorithm, *, update_serves: bool) -> bool:
    """Return whether a step needs a separate log-prob pass for training. Diagnosis, which is not
    considered here, may need the pass in other steps, too.

    `algorithm` is the algorithm of the recipe. `update_serves`: whether the log-probs of the step's
    training pass serve as the old log-probs.
    """
    config, known = recipe.algorithm, traits(algorithm)
    needs_old = known.needs_old_logprobs and config.old_logprobs == "trainer"
    return (
        (needs_old and not update_serves)
        or recipe.moe.routing_replay == "r2"
        or (config.kl_coef > 0 and config.kl_in == "reward")
        or config.turn_rewards
        or config.router_shift_floor is not None  # the pass before the update has the old scores
        or known.needs_critic  # while the critic warms up, no update has a pass of the policy
    )
