"""Makes the policy that a recipe trains."""

from __future__ import annotations

from typing import Any

from mrl.config import Recipe
from mrl.config.adapter import Adapter
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
    """Build the policy of a recipe and load its weights; without an optimizer unless it trains.

    `shared`: the `base` that it has together with other policies, and its `name` among them.
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
        lora=lora_setup(adapter, recipe),
        **shared,
    )
