"""The properties of a LoRA adapter (arXiv 2106.09685), which must be the same in trainer, engine and
files.

An adapted linear layer computes `W x + (alpha / rank) B (A x)`. The matrices `A` [rank, inputs] and
`B` [outputs, rank] are trained; the base weight `W` is frozen. Tensors have PEFT's names: the
Hugging Face name of the module after a prefix, then `lora_A` or `lora_B`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mrl.errors import InputError

PEFT_PREFIX = "base_model.model."
Experts = Literal["none", "shared_outer", "per_expert"]
"""Which LoRA matrices the experts of a layer have.

- none: the experts are frozen.
- per_expert: every expert has a separate `A` and `B` for each projection.
- shared_outer: all experts of a layer share the `A` of the gate and up projections and the `B` of
  the down projection; the other matrices are separate for each expert.
"""


@dataclass(frozen=True)
class Adapter:
    """The modules of a model that have a low-rank update, and the size of the update."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """The adapted modules outside the experts, by the last part of their Hugging Face names
    (`q_proj`)."""
    experts: Experts = "none"
    expert_modules: tuple[str, ...] = ()
    """The adapted modules of an expert (`gate_proj up_proj down_proj`); empty if `experts` is
    `none`."""

    @property
    def scale(self) -> float:
        """The factor `alpha / rank` of the product `B A`."""
        return self.alpha / self.rank

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The names of all adapted modules, each once."""
        return tuple(dict.fromkeys((*self.modules, *self.expert_modules)))

    def describe(self) -> str:
        """Return a one-line description for the terminal."""
        parts = list(self.modules)
        if self.experts != "none":
            parts.append(f"experts {self.experts} ({', '.join(self.expert_modules)})")
        return f"rank {self.rank}, alpha {self.alpha:g}: {', '.join(parts)}; the base is frozen"

    def peft_config(self, base: str = "") -> dict[str, Any]:
        """Return the contents of PEFT's adapter_config.json. `base` is the name or path of the base
        model."""
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
    """Limits on the adapters that an engine accepts. The engine reserves memory for the largest
    adapter that these limits allow."""

    rank: int
    modules: tuple[str, ...]
    """Names of modules outside the experts, as in `Adapter`."""
    experts: Experts = "none"
    """The expert matrices that the engine accepts. `per_expert` accepts adapters of both kinds,
    `per_expert` and `shared_outer`; `shared_outer` accepts only `shared_outer` adapters; `none`
    accepts only adapters without expert matrices."""
    expert_modules: tuple[str, ...] = ()
    num_slots: int = 3
    """Maximum number of different adapters in a batch, counting the base model as one. Requests for
    further adapters wait for a slot. Each slot permanently reserves device memory for the largest
    adapter."""

    @classmethod
    def around(cls, adapters: Sequence[Adapter], num_slots: int = 3) -> AdapterLimits:
        """Return the smallest limits that fit all of these adapters.

        The default number of slots fits the newest version of an adapter, one older version that
        requests still use, and the base model.
        """
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
        """The names of all adapted modules, each once."""
        return tuple(dict.fromkeys((*self.modules, *self.expert_modules)))

    def check(self, adapter: Adapter) -> None:
        """Raise InputError if the adapter exceeds these limits in its rank, modules or kind of expert
        matrices."""
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
    """Return PEFT's name for a LoRA matrix. `hf_name`: the Hugging Face name of the adapted weight,
    such as `model.layers.0.self_attn.q_proj.weight`. `matrix`: `A` or `B`.

    For a matrix that all experts share, `hf_name` has no expert number, and neither has the result:
    `...mlp.experts.gate_proj.lora_A.weight`.
    """
    return f"{PEFT_PREFIX}{hf_name.removesuffix('.weight')}.lora_{matrix}.weight"
