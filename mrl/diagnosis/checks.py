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
    if recipe.moe.replay == "ids_weights" and recipe.moe.routing_replay != "r2":
        raise InputError(
            f"moe.replay is ids_weights, but moe.routing_replay is {recipe.moe.routing_replay}, which "
            "has no gate weights (the engine returns expert ids only); set it to r2, or moe.replay to "
            "ids"
        )
