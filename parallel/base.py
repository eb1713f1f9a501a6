"""The modules of a model on this rank, without what trains them: one model's own, or shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mrl.config import ModelConfig, MoeConfig, Recipe
from mrl.errors import InputError
from parallel.hf_config import HfModel
from parallel.implementation import choose_dtype, choose_implementation
from parallel.mesh import Mesh
from parallel.model import OutputLayer, build_chunks
from parallel.options.read import MegatronOptions, read_options
from parallel.transformer_config import build_config


@dataclass(frozen=True)
class BaseSetup:
    """A setup says how the modules of a model compute. Policies that share modules agree on it."""

    model: HfModel
    config: ModelConfig
    recompute: bool = False
    moe: MoeConfig = field(default_factory=MoeConfig)
    """The modules have its order of a token's experts, and its update of the experts' biases."""
    true_on_policy: bool = False
    """Layers that compute each token as the engine does (`layers/invariant.py`)."""
    options: MegatronOptions = field(default_factory=MegatronOptions)
    """The recipe's own, for Megatron. The modules have its fields of TransformerConfig."""
    logprob_chunk_tokens: int = 0
    """Tokens whose logits are computed at a time; 0 gives all logits, and a critic has none."""
    is_adapted: bool = False
    """Whether an adapter is trained: it is built into the native layers."""

    @staticmethod
    def of(recipe: Recipe, model: HfModel) -> BaseSetup:
        """Return what a recipe asks for."""
        return BaseSetup(
            model,
            recipe.model,
            recipe.train.recompute,
            recipe.moe,
            recipe.rollout.true_on_policy,
            read_options(recipe.megatron),
            recipe.train.logprob_chunk_tokens,
            is_adapted=recipe.lora is not None,
        )

    @property
    def experts_in_order(self) -> bool:
        return "order" in self.moe.replay

    @property
    def recomputes_routers(self) -> bool:
        """Whether the routers run a second time in the backward pass."""
        return self.recompute or self.options.recomputes_routers

    def require_same(self, other: BaseSetup) -> None:
        """Raise InputError where a policy that is set up like `other` cannot share these modules."""
        here, there = self._keys(), other._keys()
        for key, expected in here.items():
            if there[key] != expected:
                raise InputError(
                    f"{key}: got {there[key]}, but the base that the policies share has {expected}; "
                    "give all of them the same"
                )

    def _keys(self) -> dict[str, Any]:
        """Return everything that the modules depend on, by the keys of a recipe."""
        return {
            "model.path": self.model.path.resolve(),
            "model.architecture": self.model.named,
            "model.dtype": choose_dtype(self.config.dtype),
            "train.recompute": self.recompute,
            "train.logprob_chunk_tokens": self.logprob_chunk_tokens,
            "moe.replay with `order`": self.experts_in_order,
            "moe.expert_bias_update_rate": self.moe.expert_bias_update_rate,
            "rollout.true_on_policy": self.true_on_policy,
            "megatron": dict(self.options.transformer),
            "lora": self.is_adapted,
        }


class Base:
    """A `Base` holds the bare chunks of a model on this rank; their weights are random at first.

    A model trains these chunks, or adapters in their layers. This base is that of one model alone;
    `parallel.lora.shared_base.SharedBase` is that of several policies.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    """Its own kinds in the ledger; without one its weights are among those of its one model."""

    def __init__(
        self, setup: BaseSetup, mesh: Mesh, output_layer: OutputLayer | None = None
    ) -> None:
        """Build the chunks. `output_layer` takes the place of the vocabulary's projection."""
        self.setup, self.mesh = setup, mesh
        self.dtype = choose_dtype(setup.config.dtype)
        asked = "local" if setup.is_adapted else setup.config.transformer_impl
        implementation, _ = choose_implementation(asked)
        self.settings = build_config(
            setup.model, mesh.dims, mesh.device, self.dtype, implementation, setup.recompute,
            setup.moe.expert_bias_update_rate, setup.true_on_policy, setup.options,
        )  # fmt: skip
        self.chunks = build_chunks(
            setup.model, mesh, self.settings, implementation, output_layer, setup.true_on_policy,
            setup.experts_in_order, setup.logprob_chunk_tokens,
        )  # fmt: skip
        self.mounted: Any = None
        """The model whose adapter, hooks and replays are in the chunks now."""

    @property
    def is_shared(self) -> bool:
        """Whether several policies have it, each with an adapter of its own."""
        return bool(self.kinds)

    def take(self, model: Any, seed: int) -> None:
        """Let `model` be mounted: it puts its parts into the chunks now. `seed`: that of an adapter."""
        assert self.mounted is None, "a base of one model was given to another"
        self.mounted = model

    def release(self, model: Any) -> bool:
        """Let go of a model that is closed; return whether it had not been let go of before."""
        return True

    def require_mounted(self, model: Any) -> None:
        """Raise RuntimeError where the parts of `model` are not in the chunks."""
        if self.mounted is not model:
            other = "no policy is" if self.mounted is None else f"{self.mounted.name!r} is"
            raise RuntimeError(f"policy {model.name!r} is not mounted, {other}; call mount() first")
