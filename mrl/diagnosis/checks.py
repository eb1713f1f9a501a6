"""What a recipe may ask to be captured and replayed."""

from __future__ import annotations

from mrl.config import Recipe
from mrl.errors import InputError
from parallel.hf_config import HfModel


def check_capture(recipe: Recipe, model: HfModel) -> None:
    """Raises InputError."""
    if recipe.diagnosis.capture_routes and not model.moe_layer_numbers:
        raise InputError(
            f"diagnosis.capture_routes is true, but {model.path} has no MoE layers; leave it out"
        )
    if recipe.rollout.return_routing_weights and not recipe.captures_routes:
        raise InputError(
            "rollout.return_routing_weights is true, but the engine is asked for no routes; set "
            "moe.routing_replay=r3 or diagnosis.capture_routes=true, or leave it out"
        )
    replay, how = recipe.moe.replay, recipe.moe.routing_replay
    if replay != "ids" and how == "off":
        raise InputError(
            f"moe.replay is {replay}, but moe.routing_replay is off: nothing is replayed; set it to r2 "
            "or r3"
        )
    if "order" in replay:
        _check_order(recipe.parallel.moe_token_dispatcher_type)
    if "weights" in replay and how == "r3" and not recipe.rollout.return_routing_weights:
        raise InputError(
            f"moe.replay is {replay} under moe.routing_replay=r3, but the engine returns expert ids "
            "only; set rollout.return_routing_weights=true (engines on CPUs), or moe.routing_replay=r2"
        )


def _check_order(dispatcher: str) -> None:
    if dispatcher != "alltoall":
        raise InputError(
            "moe.replay asks for the order of the experts, but parallel.moe_token_dispatcher_type is "
            f"{dispatcher}, which adds them by number before a token is back; set it to alltoall"
        )
