"""Configures LoRA: which low-rank matrices are trained in the place of the whole model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from mrl.config.adapter import Experts
from mrl.config.branch import Branch


class LoraConfig(Branch):
    rank: int = Field(default=32, ge=1)
    """Rank of every update: A is [rank, inputs], B is [outputs, rank]."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is (alpha / rank) B A."""
    targets: Literal["attention"] | tuple[str, ...] = "attention"
    """`attention` adapts every projection of the attention; or Hugging Face's names of modules
    (`[q_proj, v_proj]`), outside the experts."""
    experts: Experts = "none"
    """Each expert gets an A and a B for every projection with `per_expert`. `shared_outer` shares
    the A of gate and up projection and the B of the down projection over the experts of a layer."""
    dropout: float = 0.0
    """Only 0: the engine has no dropout, so trainer and engine would be two policies."""
    base_dtype: str | None = None
    """Only null: the base is stored in `model.dtype`, as the engine holds it."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How A begins, as in PEFT: `kaiming` is uniform within 1 / sqrt(inputs), `gaussian` is normal with
    a standard deviation of 1 / rank. B begins with 0, so training begins with the base."""
    path: str | None = None
    """PEFT folder to begin with (adapter_config.json and adapter_model.safetensors), in the place of
    `init`. Its rank, alpha and modules must be those given here."""
    rollout: Literal["adapter", "merged"] = "adapter"
    """`adapter` sends A and B to the engine, which keeps the base. `merged` adds the update to the base
    weights and sends the whole model, for engines that cannot serve an adapter."""

    @field_validator("dropout")
    @classmethod
    def _has_no_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError(
                "expected 0, because the engine has no dropout and would sample from another policy; "
                "leave it out"
            )
        return value

    @field_validator("base_dtype")
    @classmethod
    def _has_the_dtype_of_the_model(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError(
                "expected null, because a base that is rounded is another model than the engine and "
                "the checkpoint's folder hold; give model.dtype, which is that of both"
            )
        return value
