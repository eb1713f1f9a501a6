"""Check the settings of MoE routing: replay, capture and balancing."""

from __future__ import annotations

from mrl.config import MoeConfig, Recipe
from mrl.errors import InputError
from parallel.hf_config import HfModel


def check_moe(recipe: Recipe, model: HfModel) -> None:
    """Raise InputError for settings that contradict each other or that the model does not support."""
    if recipe.moe.routing_replay != "off" and not model.moe_layer_numbers:
        raise InputError(
            f"moe.routing_replay is {recipe.moe.routing_replay}, but {model.path} has no MoE layers; "
            "set it to off"
        )
    _check_capture(recipe, model)
    _check_router_shift(recipe, model)
    check_balancing(recipe.moe, model)


def _check_capture(recipe: Recipe, model: HfModel) -> None:
    if recipe.diagnosis.capture_routes and not model.moe_layer_numbers:
        raise InputError(
            f"diagnosis.capture_routes is true, but {model.path} has no MoE layers; leave it out"
        )
    if recipe.rollout.return_routing_weights and not recipe.captures_routes:
        raise InputError(
            "rollout.return_routing_weights is true, but no routes are requested from the engine; set "
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
            f"moe.replay is {replay} with moe.routing_replay=r3, but the engine returns only expert "
            "ids; set rollout.return_routing_weights=true (engines on CPUs), or moe.routing_replay=r2"
        )


def _check_router_shift(recipe: Recipe, model: HfModel) -> None:
    """Raise InputError if `algorithm.router_shift_floor` is set and the model's routers, or the rows of
    one rank, do not give the shift."""
    if recipe.algorithm.router_shift_floor is None:
        return
    start = f"algorithm.router_shift_floor is {recipe.algorithm.router_shift_floor:g}, but"
    if not model.moe_layer_numbers:
        raise InputError(f"{start} {model.path} has no MoE layers; leave it out")
    settings = model.architecture.transformer_config(model.config)
    scores = settings.get("moe_router_score_function", "softmax")
    if scores != "softmax":
        raise InputError(
            f"{start} the routers of {model.architecture.model_type} score by {scores}, and the shift "
            "is defined for softmax; leave it out"
        )
    layout = recipe.parallel
    for key in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ):
        if getattr(layout, key) > 1:
            raise InputError(
                f"{start} parallel.{key} is {getattr(layout, key)}: the shift of a token is computed "
                "on a rank that has its whole row in all layers; set it to 1, or leave the floor out"
            )
    if recipe.train.share_prefixes != "off":
        raise InputError(
            f"{start} train.share_prefixes is {recipe.train.share_prefixes}: a shared row stands for "
            "several tokens, each of which has a shift of its own; set it to off"
        )


def _check_order(dispatcher: str) -> None:
    if dispatcher != "alltoall":
        raise InputError(
            "moe.replay includes the order of the experts, but parallel.moe_token_dispatcher_type is "
            f"{dispatcher}, which adds up the experts' outputs by expert number; set it to alltoall"
        )


def check_balancing(moe: MoeConfig, model: HfModel) -> None:
    """Raise InputError for settings of load balancing that contradict each other or that the model
    does not support."""
    kind, coeff = moe.load_balancing_type, moe.aux_loss_coeff
    if coeff and kind == "none":
        raise InputError(
            f"moe.aux_loss_coeff is {coeff}, but moe.load_balancing_type is none; choose a type, or "
            "set the coefficient to 0"
        )
    if not coeff and kind != "none":
        raise InputError(
            f"moe.load_balancing_type is {kind}, but moe.aux_loss_coeff is 0; give it a weight, or set "
            "the type to none"
        )
    wanted = {
        "aux_loss_coeff": coeff,
        "z_loss_coeff": moe.z_loss_coeff,
        "expert_bias_update_rate": moe.expert_bias_update_rate,
    }
    for name, value in wanted.items():
        if value and not model.moe_layer_numbers:
            raise InputError(
                f"moe.{name} is {value}, but {model.path} has no MoE layers; set it to 0"
            )
    settings = model.architecture.transformer_config(model.config)
    if moe.expert_bias_update_rate and not settings.get("moe_router_enable_expert_bias"):
        raise InputError(
            f"moe.expert_bias_update_rate is {moe.expert_bias_update_rate}, but the routers of "
            f"{model.architecture.model_type} have no expert bias; set it to 0, or balance with "
            "moe.load_balancing_type"
        )
