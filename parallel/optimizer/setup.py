"""Make Megatron's optimizer and learning-rate schedule for the chunks of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mrl.config import OptimizerConfig
from parallel.optimizer.adam_step import NO_CLIPPING
from parallel.optimizer.muon import MuonAndAdam
from parallel.optimizer.muon_setup import build_muon
from parallel.options.read import MegatronOptions
from parallel.weights import WeightMap


def build_optimizer_config(
    config: OptimizerConfig,
    dtype: torch.dtype,
    use_distributed_optimizer: bool,
    options: MegatronOptions = MegatronOptions(),  # noqa: B008
) -> MegatronOptimizerConfig:
    """Return Megatron's settings for Adam, also where Muon updates the matrices.

    The recipe's `options` override all other settings.
    """
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad or NO_CLIPPING,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    return dataclasses.replace(settings, **options.optimizer)


def build_optimizer(
    config: OptimizerConfig,
    chunks: list[Any],
    dtype: torch.dtype,
    weights: WeightMap,
    options: MegatronOptions = MegatronOptions(),  # noqa: B008
) -> tuple[Any, OptimizerParamScheduler]:
    """Return Megatron's optimizer for the chunks, and its learning-rate schedule at step 0.

    `weights` maps the parameters of the chunks to their places in the whole model. If the learning
    rate decays, `config.lr_decay_steps` must be set.
    """
    # The chunks decide how gradients are reduced; `config` may be that of SFT and differ.
    distributed = chunks[0].ddp_config.use_distributed_optimizer
    settings = build_optimizer_config(config, dtype, distributed, options)
    if config.name == "muon":
        optimizer = build_muon(config, settings, chunks, weights)
    else:
        optimizer = get_megatron_optimizer(settings, chunks)
    use_fused_kernels(optimizer)
    return optimizer, build_schedule(config, optimizer)


def build_schedule(config: OptimizerConfig, optimizer: Any) -> OptimizerParamScheduler:
    """Return Megatron's learning-rate schedule, at step 0, for the groups of `optimizer`."""
    warmup = config.lr_warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=config.lr_decay_steps or warmup + 1,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # Only the number of steps comes from a checkpoint, everything else from the recipe.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=config.wsd_decay_steps,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )


def use_fused_kernels(optimizer: Any) -> None:
    """Let torch's own Adam update each parameter in one kernel, in place.

    Megatron builds `torch.optim.AdamW` if neither TransformerEngine nor apex is installed, and has
    no option for its `fused` form. On CUDA torch uses the `foreach` form by default. The
    intermediate lists of that form take as much memory as one more fp32 copy of the parameters
    (documentation of torch.optim.AdamW). Other optimizers are left unchanged.
    """
    for adam in torch_adams(optimizer):
        for group in (*adam.param_groups, adam.defaults):
            group["fused"], group["foreach"] = True, False


def torch_adams(optimizer: Any) -> Iterator[torch.optim.Adam]:
    """Yield the torch Adam optimizers inside Megatron's optimizer, such as one for dense parameters
    and one for experts."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        outer = getattr(part, "optimizer", None)
        inside = outer.sub_optimizers if isinstance(outer, MuonAndAdam) else [outer]
        yield from (inner for inner in inside if isinstance(inner, torch.optim.Adam))
