"""Check the settings of the optimizer: those of Muon against the rest of the recipe."""

from __future__ import annotations

from mrl.config import OptimizerConfig, Recipe
from mrl.errors import InputError

ONLY_ADAM = (
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    "overlap_param_gather",
    "reduce_scatter_with_fp32_accumulation",
)
"""Options of Megatron that belong to Adam, or to the distributed optimizer that shards its state."""
QUINTIC_SETS = 5
"""Number of coefficient sets of `muon_coefficient_type: quintic`, which follow each other."""


def check_optimizer(recipe: Recipe) -> None:
    """Raise InputError for settings of Muon that have no effect or that cannot be combined."""
    config = recipe.optimizer
    if config.name != "muon":
        _refuse_without_muon(config)
        return
    steps = config.muon_num_ns_steps
    if config.muon_coefficient_type == "quintic" and steps % QUINTIC_SETS:
        raise InputError(
            f"optimizer.muon_num_ns_steps is {steps}, but muon_coefficient_type=quintic has "
            f"{QUINTIC_SETS} sets, which belong together; give a multiple of that, or simple"
        )
    for name in ONLY_ADAM:
        if recipe.megatron.get(name):
            raise InputError(
                f"megatron.{name} is {recipe.megatron[name]!r}, but optimizer.name is muon, and only "
                "Adam has it; leave it out, or set optimizer.name=adam"
            )
    if recipe.megatron.get("decoupled_weight_decay") is False:
        raise InputError(
            "megatron.decoupled_weight_decay is false, but optimizer.name is muon, whose weight decay "
            "is decoupled; leave it out, or set optimizer.name=adam"
        )


def _refuse_without_muon(config: OptimizerConfig) -> None:
    plain = OptimizerConfig()
    for name in OptimizerConfig.model_fields:
        value = getattr(config, name)
        if name.startswith("muon_") and value != getattr(plain, name):
            raise InputError(
                f"optimizer.{name} is {value}, but optimizer.name is adam; set it to muon, or leave "
                f"{name} out"
            )
