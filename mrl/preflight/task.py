"""Check that the recipe has rewards or an environment, and that they can be loaded."""

from __future__ import annotations

from pathlib import Path

from mrl.algorithms import load_algorithm
from mrl.algorithms.base import traits
from mrl.config import Recipe
from mrl.data.reader import source_name
from mrl.environments.base import environment_names, resolve_environment
from mrl.environments.command import resolved
from mrl.environments.hosted.spec import worker_spec
from mrl.errors import InputError
from mrl.rewards import resolve_reward, reward_names
from mrl.rewards.terms import all_terms


def check_task(
    recipe: Recipe, eval_set: str | None = None, *, imports_rewards: bool = True
) -> None:
    """Check that the recipe has either rewards or an environment, and load them.

    `recipe` is the run's recipe, or the recipe of the eval set named `eval_set`. If
    `imports_rewards` is false, only rewards and environments that come with mrl are loaded. If
    rollouts are loaded instead of generated, no reward or environment is loaded, but the folder of
    the rollouts must exist.

    Raises InputError if the recipe has both rewards and an environment, or neither of them, or if
    one of them cannot be loaded.
    """
    reward, environment = recipe.reward, recipe.environment
    is_scored = environment is not None and environment.gives_rewards
    if is_scored and recipe.data.rewards:
        raise InputError(
            "data.sources: an environment gives the rewards itself; leave `reward` out"
        )
    if reward is not None and is_scored:
        raise InputError(
            "reward and environment: both are given, expected exactly one; an environment gives the "
            "rewards itself (reward=null removes the recipe's)"
        )
    if reward is None and not is_scored and not recipe.data.has_all_rewards:
        if environment is not None:
            raise InputError(
                "reward: none is given, but environment.mcp has none of its own; give the reward that "
                "judges the last answer of an episode, such as reward=math_verify"
            )
        raise InputError(
            "reward and environment: neither is given, expected exactly one, such as "
            f"reward=math_verify{_who_needs_it(recipe, eval_set)}"
        )
    if (saved := recipe.debug.load_rollouts) is not None:
        if not Path(saved).is_dir():  # which steps are needed depends on the run folder
            raise InputError(
                f"debug.load_rollouts: no folder {saved}; give the rollouts/ of a run with "
                "debug.save_rollouts=true"
            )
        return
    _check_agents(recipe, eval_set)
    name = None if environment is None else environment.name
    if name is not None and (imports_rewards or name in environment_names()):
        resolve_environment(name)
    for term in all_terms(recipe):
        if imports_rewards or term.path in reward_names():
            resolve_reward(term.path)


def _check_agents(recipe: Recipe, eval_set: str | None) -> None:
    """Check that there is an endpoint if and only if there are agents, and that their program
    exists."""
    environment = recipe.environment
    has_agents = environment is not None and environment.is_agent
    if environment is not None and has_agents and not recipe.rollout.endpoint:
        kind = next(k for k in ("command", "verifiers", "mcp") if getattr(environment, k))
        raise InputError(
            f"environment.{kind}: its episodes talk to the policy at an endpoint; set "
            "rollout.endpoint=true"
        )
    if recipe.rollout.endpoint and not has_agents and eval_set is None:
        raise InputError(
            "rollout.endpoint is true, but nothing would use it: give the agent as "
            "environment.command (docs/endpoint.md), or leave the key out"
        )
    if environment is not None and environment.command:
        resolved(environment.command)
    if environment is not None and environment.is_hosted:
        worker_spec(environment)
    if recipe.rollout.endpoint_branches == "tree" and eval_set is None:
        _check_tree(recipe, has_agents=has_agents)


def _check_tree(recipe: Recipe, *, has_agents: bool) -> None:
    """Check that each sample has one advantage, which all branches of an episode can have."""
    algorithm, tree = recipe.algorithm, "rollout.endpoint_branches is tree, but"
    if not has_agents:
        raise InputError(f"{tree} there are no agents (environment.command); leave it out")
    if traits(load_algorithm(algorithm.name)).needs_critic:
        raise InputError(
            f"{tree} algorithm.name={algorithm.name} has a critic, whose returns would count an "
            "episode once for each branch; take longest, or an algorithm without one"
        )
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        raise InputError(
            f"{tree} algorithm.kl_in is reward, where branches would pay for each other; take longest, "
            "or algorithm.kl_in=loss"
        )


def _who_needs_it(recipe: Recipe, eval_set: str | None) -> str:
    """Return the words that end an error message and name the eval set or source that has no reward.

    The result is empty if `eval_set` is None and no source has its own reward.
    """
    if eval_set is not None:
        return f"; the evaluation set {eval_set} has no reward of its own"
    without = [source_name(each) for each in recipe.data.sources if each.reward is None]
    if recipe.data.rewards:
        return f"; the source {without[0]} has no reward of its own"
    return ""
