"""What trainer, engine and files must agree on about a LoRA adapter (arXiv 2106.09685).

An adapted linear layer computes `W x + (alpha / rank) B (A x)`. A [rank, inputs] and B [outputs, rank]
are trained; W, the base, is frozen. Tensors go by the names of PEFT, which are those of the Hugging
Face weights between a prefix and `lora_A` or `lora_B`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mrl.errors import InputError

PEFT_PREFIX = "base_model.model."
Experts = Literal["none", "shared_outer", "per_expert"]
"""Which matrices the experts of a layer have.

- none: experts are frozen.
- per_expert: every expert has its own A and B of each projection.
- shared_outer: the A of gate and up projection and the B of the down projection are one for all experts
  of a layer; the other ones are each expert's own.
"""


@dataclass(frozen=True)
class Adapter:
    """An `Adapter` says which modules of a model have a low-rank update, and of which size."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """Hugging Face's names of the adapted modules outside the experts, without a path (`q_proj`)."""
    experts: Experts = "none"
    expert_modules: tuple[str, ...] = ()
    """The adapted modules of an expert (`gate_proj up_proj down_proj`); none where `experts` is."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    @property
    def target_modules(self) -> tuple[str, ...]:
        """All names of adapted modules, each once."""
        return tuple(dict.fromkeys((*self.modules, *self.expert_modules)))

    def describe(self) -> str:
        """Return one line for the terminal."""
        parts = list(self.modules)
        if self.experts != "none":
            parts.append(f"experts {self.experts} ({', '.join(self.expert_modules)})")
        return f"rank {self.rank}, alpha {self.alpha:g}: {', '.join(parts)}; the base is frozen"

    def peft_config(self, base: str = "") -> dict[str, Any]:
        """Return the content of PEFT's adapter_config.json. `base`: name or path of the base model."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.target_modules),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


@dataclass(frozen=True)
class AdapterLimits:
    """The limits say what the adapters of one engine may have: it makes room for the largest."""

    rank: int
    modules: tuple[str, ...]
    """Names of modules outside the experts, as in `Adapter`."""
    experts: Experts = "none"
    """An engine for `per_expert` takes both kinds; one for `shared_outer` those that share."""
    expert_modules: tuple[str, ...] = ()
    num_slots: int = 3
    """Adapters in a batch, the base among them. Requests of more versions wait for a slot. Each slot is
    as large as the largest adapter and stays on the device."""

    @classmethod
    def around(cls, adapters: Sequence[Adapter], num_slots: int = 3) -> AdapterLimits:
        """Return the smallest limits that hold all of these; the default has a slot for the newest
        version, one that is still in flight, and the base."""
        kinds = {adapter.experts for adapter in adapters if adapter.experts != "none"}
        experts: Experts = "shared_outer" if kinds == {"shared_outer"} else "per_expert"
        return cls(
            rank=max(adapter.rank for adapter in adapters),
            modules=tuple(dict.fromkeys(name for each in adapters for name in each.modules)),
            experts=experts if kinds else "none",
            expert_modules=tuple(
                dict.fromkeys(name for each in adapters for name in each.expert_modules)
            ),
            num_slots=num_slots,
        )

    @property
    def target_modules(self) -> tuple[str, ...]:
        """All names of adapted modules, each once."""
        return tuple(dict.fromkeys((*self.modules, *self.expert_modules)))

    def check(self, adapter: Adapter) -> None:
        """Raise InputError for an adapter that the engine has no room for."""
        if adapter.rank > self.rank:
            raise InputError(
                f"lora.rank={adapter.rank}: the engine was started for ranks up to {self.rank}; lower "
                "lora.rank, or start the engine with a larger limit"
            )
        for key, names, known in (
            ("lora.targets", adapter.modules, self.modules),
            ("lora.experts", adapter.expert_modules, self.expert_modules),
        ):
            if unknown := set(names) - set(known):
                raise InputError(
                    f"{key}: the engine was started without {', '.join(sorted(unknown))}, for "
                    f"{', '.join(known) or 'none'}; choose among these, or start it with more"
                )
        if adapter.experts == "per_expert" and self.experts == "shared_outer":
            raise InputError(
                "lora.experts=per_expert: the engine was started for adapters that share their outer "
                "matrices; set lora.experts=shared_outer, or start it for per_expert, which takes both"
            )


def lora_name(hf_name: str, matrix: Literal["A", "B"]) -> str:
    """Return PEFT's name of a matrix of a weight (`model.layers.0.self_attn.q_proj.weight`).

    What all experts share goes by the name of the module without the number of an expert:
    `...mlp.experts.gate_proj.lora_A.weight`.
    """
    return f"{PEFT_PREFIX}{hf_name.removesuffix('.weight')}.lora_{matrix}.weight"
