"""The modules of a Megatron model on this rank, and what a model attaches to them.

A base holds only the modules. The model that trains them adds an optimizer, and attaches its
adapter, its hooks and its routing replays. It can detach these again, so that several policies can
take turns on one base.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from mrl.config import ModelConfig, MoeConfig, Recipe
from mrl.errors import InputError
from parallel.hf_config import HfModel
from parallel.implementation import choose_dtype, choose_implementation, own_layers_only
from parallel.mesh import Mesh
from parallel.model import OutputLayer, build_chunks
from parallel.options.read import MegatronOptions, read_options
from parallel.transformer_config import build_config


@dataclass(frozen=True)
class BaseSetup:
    """The settings that decide how the modules of a model compute. Policies that share modules must
    have equal setups."""

    model: HfModel
    config: ModelConfig
    recompute: bool = False
    moe: MoeConfig = field(default_factory=MoeConfig)
    """The recipe's `moe` section. The modules depend only on its `expert_bias_update_rate`, and on
    whether its `replay` contains `order`."""
    true_on_policy: bool = False
    """Whether the layers compute each token as the engine does (`layers/invariant.py`)."""
    options: MegatronOptions = field(default_factory=MegatronOptions)
    """The recipe's `megatron` section. The modules depend only on its TransformerConfig
    fields."""
    logprob_chunk_tokens: int = 0
    """The number of tokens whose logits are computed at a time; 0 computes the logits of all tokens
    at once. It is 0 for a critic, which has no logits."""
    is_adapted: bool = False
    """Whether an adapter is trained. An adapter needs mrl's own layers, not TransformerEngine's."""

    @staticmethod
    def of(recipe: Recipe, model: HfModel) -> BaseSetup:
        """Return the setup that a recipe asks for."""
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
        """Raise InputError if modules with this setup cannot be shared by a policy with the setup
        `other`."""
        here, there = self._keys(), other._keys()
        for key, expected in here.items():
            if there[key] != expected:
                raise InputError(
                    f"{key}: got {there[key]}, but the base that the policies share has {expected}; "
                    "give all of them the same"
                )

    def _keys(self) -> dict[str, Any]:
        """Return all settings that the modules depend on, by recipe key."""
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


class Attachment(Protocol):
    """A part of a model that is attached to the modules of its base: an adapter, hooks or routing
    replays.

    Creating an attachment attaches it.
    """

    def attach(self) -> None: ...
    def detach(self) -> None: ...


Part = TypeVar("Part", bound=Attachment)


class Attachments:
    """All attachments of one model, in the order in which they were created."""

    def __init__(self) -> None:
        self._parts: list[Attachment] = []

    def add(self, part: Part) -> Part:
        """Register and return an attachment that was just created."""
        self._parts.append(part)
        return part

    def attach(self) -> None:
        """Attach everything to the modules again, in the original order, because hooks run in the
        order in which they are attached."""
        for part in self._parts:
            part.attach()

    def detach(self) -> None:
        """Detach everything from the modules, in reverse order."""
        for part in reversed(self._parts):
            part.detach()


class GatherHooks:
    """The forward hooks in which Megatron's DDP waits until the weights are gathered from all ranks.
    DDP has these hooks only with `overlap_param_gather`."""

    def __init__(self, chunks: list[Any]) -> None:
        """Remember which of `chunks` have these hooks now. The chunks must be wrapped in DDP, which
        has already installed the hooks if it uses them."""
        self._chunks = [chunk for chunk in chunks if chunk.use_forward_hook]

    def attach(self) -> None:
        for chunk in self._chunks:
            chunk.enable_forward_pre_hook()

    def detach(self) -> None:
        for chunk in self._chunks:
            chunk.disable_forward_pre_hook(param_sync=False)


class Base:
    """The chunks of one model on this rank, one per virtual pipeline stage, without DDP's wrapper.
    Their weights are random at first.

    The model trains the weights of these chunks, or an adapter in their layers. Several policies
    can share a base only if it is a `parallel.lora.shared_base.SharedBase`.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    """The kinds (names in the memory ledger) under which the base registers its weights. Empty if
    the base has only one model, which registers the weights instead."""

    def __init__(
        self, setup: BaseSetup, mesh: Mesh, output_layer: OutputLayer | None = None
    ) -> None:
        """Build the chunks. `output_layer` replaces the projection onto the vocabulary."""
        self.setup, self.mesh = setup, mesh
        self.dtype = choose_dtype(setup.config.dtype)
        asked = "local" if setup.is_adapted else setup.config.transformer_impl
        if setup.model.sizes.has_linear_attention:
            asked = own_layers_only(asked, setup.model.architecture.model_type)
        implementation, _ = choose_implementation(asked)
        self.implementation = implementation
        self.settings = build_config(
            setup.model, mesh.dims, mesh.device, self.dtype, implementation, setup.recompute,
            setup.moe.expert_bias_update_rate, setup.true_on_policy, setup.options,
        )  # fmt: skip
        self.chunks = build_chunks(
            setup.model, mesh, self.settings, implementation, output_layer, setup.true_on_policy,
            setup.experts_in_order, setup.logprob_chunk_tokens,
        )  # fmt: skip
        self.mounted: Any = None
        """The model whose adapter, hooks and routing replays are attached to the chunks now; None
        if no model is mounted."""

    @property
    def is_shared(self) -> bool:
        """Whether several policies share the base, each with its own adapter."""
        return bool(self.kinds)

    def take(self, model: Any, seed: int) -> None:
        """Record that `model`, which is still being built, is mounted. The model itself attaches
        its adapter, hooks and routing replays. `seed` is the adapter's seed; only a shared base
        uses it."""
        assert self.mounted is None, "a base of one model was given to another"
        self.mounted = model

    def release(self, model: Any) -> bool:
        """Release `model`, which is being closed. Return True, except that a shared base returns
        False if the model was released before."""
        return True

    def require_mounted(self, model: Any) -> None:
        """Raise RuntimeError if `model` is not the mounted model."""
        if self.mounted is not model:
            other = "no policy is" if self.mounted is None else f"{self.mounted.name!r} is"
            raise RuntimeError(f"policy {model.name!r} is not mounted, {other}; call mount() first")
