"""The sizes of a parallel layout and their arithmetic, without torch or Megatron.

In attention and dense layers world = tp x cp x dp x pp; in expert layers world = etp x ep x edp x
pp, where edp is the number of replicas of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrl.config import ParallelConfig
from mrl.errors import InputError


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that must be divisible by the sizes of a parallel layout."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    dense_ffn_size: int
    """FFN columns of a dense layer; 0 if every layer is an MoE layer."""
    num_experts: int
    """Experts per MoE layer; 0 for a dense model."""
    moe_ffn_size: int = 0
    """FFN columns of one expert."""
    shared_expert_ffn_size: int = 0
    """FFN columns of all shared experts together; 0 if there are none."""
    linear_key_heads: int = 0
    """Key heads of layers with linear attention; 0 if there are no such layers."""
    experts_have_bias: bool = False
    """Whether the matrices of an expert have biases."""

    @property
    def has_linear_attention(self) -> bool:
        """Whether layers have a state that passes through all tokens of a sequence, so that a rank
        needs whole sequences."""
        return self.linear_key_heads > 0


@dataclass(frozen=True)
class ParallelDims:
    """The arrangement of `world` ranks. Each size is a number of ranks, except `vpp`, the number of
    model chunks per rank."""

    world: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    first_layers: int | None = None
    """The number of layers in the first pipeline stage; None if the stages share the layers
    equally."""
    last_layers: int | None = None
    """The number of layers in the last pipeline stage; None if the stages share the layers
    equally."""
    dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    row_multiple: int = 1
    """The number of rows of each matrix product on a rank is padded to a multiple of this number."""

    @classmethod
    def create(cls, config: ParallelConfig, world: int, *, fp8: bool = False) -> ParallelDims:
        """Take the sizes from a recipe and check that they divide `world`.

        `fp8`: whether TransformerEngine's 8-bit products are used, which need multiples of 16 rows.
        If the sizes do not divide `world`, raises an InputError that shows the arithmetic. Also
        raises InputError for settings that need several pipeline stages if there is only one stage.
        """
        dims = cls(
            world=world,
            tp=config.tensor_model_parallel_size,
            pp=config.pipeline_model_parallel_size,
            vpp=config.virtual_pipeline_model_parallel_size or 1,
            cp=config.context_parallel_size,
            ep=config.expert_model_parallel_size,
            etp=config.expert_tensor_parallel_size,
            first_layers=config.decoder_first_pipeline_num_layers,
            last_layers=config.decoder_last_pipeline_num_layers,
            dispatcher=config.moe_token_dispatcher_type,
            row_multiple=16 if fp8 else 1,
        )
        dense, expert = dims.tp * dims.cp * dims.pp, dims.etp * dims.ep * dims.pp
        if world % dense:
            raise InputError(
                f"parallel: {world} ranks are not divisible by tensor {dims.tp} x context {dims.cp} "
                f"x pipeline {dims.pp} = {dense}; start a multiple of {dense} ranks or lower a size"
            )
        if world % expert:
            raise InputError(
                f"parallel: {world} ranks are not divisible by expert {dims.ep} x expert-tensor "
                f"{dims.etp} x pipeline {dims.pp} = {expert}; start a multiple of {expert} ranks or "
                "lower a size"
            )
        if dims.vpp > 1 and dims.pp == 1:
            raise InputError(
                f"parallel.virtual_pipeline_model_parallel_size is {dims.vpp}, but "
                "pipeline_model_parallel_size is 1: interleaving needs at least 2 stages"
            )
        if (dims.first_layers or dims.last_layers) and dims.pp == 1:
            raise InputError(
                "parallel.decoder_first_pipeline_num_layers / decoder_last_pipeline_num_layers: set, "
                "but pipeline_model_parallel_size is 1; leave them out"
            )
        return dims

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on. It is always on with tensor parallelism, because
        Megatron's MoE layers refuse tensor parallelism without it."""
        return self.tp > 1

    @property
    def sequence_multiple(self) -> int:
        """A packed sequence is padded to a multiple of this many tokens (see
        `parallel.context`)."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def token_multiple(self) -> int:
        """A packed micro-batch is padded to a multiple of this many tokens."""
        return self.sequence_multiple * self.tp * self.row_multiple

    @property
    def equal_micro_batches(self) -> bool:
        """Whether all micro-batches are padded to the same length.

        Megatron's allgather dispatcher requires equal lengths. Between pipeline stages, varying lengths
        cost one more message, which waits for the device (`P2PCommunicator._communicate_shapes`).
        """
        return self.dispatcher == "allgather" or self.pp > 1

    def check_model(self, sizes: ModelSizes) -> None:
        """Raise InputError if a size of the model is not divisible by the parallel size that splits
        it, or if the layout splits experts and the model has none. The message shows the arithmetic
        of every such size."""
        rules = [
            ("attention heads", sizes.num_attention_heads, "tensor", self.tp),
            ("query groups (key/value heads)", sizes.num_query_groups, "tensor", self.tp),
            ("vocabulary entries", sizes.vocab_size, "tensor", self.tp),
            ("dense FFN columns", sizes.dense_ffn_size, "tensor", self.tp),
            ("experts", sizes.num_experts, "expert", self.ep),
            ("expert FFN columns", sizes.moe_ffn_size, "expert tensor", self.etp),
            ("shared expert FFN columns", sizes.shared_expert_ffn_size, "tensor", self.tp),
            ("key heads of linear attention", sizes.linear_key_heads, "tensor", self.tp),
            *self._layer_rules(sizes.num_layers),
        ]
        if self.ep * self.etp > 1 and not sizes.num_experts:
            name = "expert_model_parallel_size" if self.ep > 1 else "expert_tensor_parallel_size"
            raise InputError(
                f"parallel.{name} is {max(self.ep, self.etp)}, but the model has no experts"
            )
        if self.cp > 1 and sizes.has_linear_attention:
            raise InputError(
                f"parallel.context_parallel_size is {self.cp}, but the model has linear attention, "
                "whose state passes through all tokens of a sequence, so a rank needs whole sequences; "
                "set it to 1"
            )
        if self.etp > 1 and sizes.experts_have_bias:
            raise InputError(
                f"parallel.expert_tensor_parallel_size is {self.etp}, but the model's experts have "
                "biases, which Megatron-core supports with whole experts only; set it to 1"
            )
        wrong = [
            f"{count} {what} are not divisible by {size_name} parallel size {size} "
            f"({count} = {count // size} x {size} + {count % size})"
            for what, count, size_name, size in rules
            if count % size
        ]
        if wrong:
            raise InputError("parallel: " + "; ".join(wrong))

    def _layer_rules(self, num_layers: int) -> list[tuple[str, int, str, int]]:
        """Return the divisibility rules for layers as (description, number of layers, name of the
        parallel size, parallel size).

        The first and last stage may have a given number of layers; the other stages share the rest
        equally. Raises InputError if too few or too many layers are left for the other stages.
        """
        ends = [n for n in (self.first_layers, self.last_layers) if n is not None]
        if not ends:
            return [("layers", num_layers, "pipeline x virtual", self.pp * self.vpp)]
        rules = [("layers of an end stage", n, "virtual pipeline", self.vpp) for n in ends]
        stages, left = self.pp - len(ends), num_layers - sum(ends)
        if not stages and not left:
            return rules
        if left < stages or not stages:
            raise InputError(
                f"parallel: {sum(ends)} of {num_layers} layers are given to the first and last "
                f"pipeline stages, which leaves {left} for the other {stages}; change "
                "decoder_first_pipeline_num_layers or decoder_last_pipeline_num_layers"
            )
        if stages:
            rules.append(
                ("layers left for the middle", left, "pipeline x virtual", stages * self.vpp)
            )
        return rules

    def describe(self) -> str:
        """Return one line for the plan, e.g. `4 rank(s) = tensor 2 x pipeline 1 x data 2; expert 2`."""
        text = f"{self.world} rank(s) = tensor {self.tp}"
        if self.cp > 1:
            text += f" x context {self.cp}"
        text += f" x pipeline {self.pp} x data {self.dp}"
        if self.vpp > 1:
            text += f", {self.vpp} virtual stages a rank"
        text += f"; expert {self.ep}"
        if self.etp > 1:
            text += f" x expert tensor {self.etp}"
        if self.dispatcher != "alltoall":
            text += f", {self.dispatcher}"
        return text + ("; sequence parallel" if self.tp > 1 else "")


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
