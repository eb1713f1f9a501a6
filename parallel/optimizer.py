"""Megatron's optimizer and learning-rate schedule for the chunks of a model."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mrl.config import OptimizerConfig

NO_CLIPPING = 1e30
"""Megatron reports the gradient norm only where it clips."""


def build_optimizer(
    config: OptimizerConfig, chunks: list[Any], dtype: torch.dtype
) -> tuple[Any, OptimizerParamScheduler]:
    half = dtype is torch.bfloat16
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad or NO_CLIPPING,
            bf16=half,
            params_dtype=dtype,
            # As the gradients are reduced, whatever `config` says: it may be another's (warm start).
            use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
        ),
        chunks,
    )
    warmup = config.lr_warmup_steps
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=warmup + 1,
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
