"""Sizes of a layout and their arithmetic: pure numbers, no torch, no Megatron.

Attention and dense layers see world = tp x cp x dp x pp; expert layers see world = etp x ep x edp x pp.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config import ParallelConfig
from mrl.errors import InputError


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of a model that a layout has to divide."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    dense_ffn_size: int
    """0 when every layer is MoE."""
    num_experts: int
    """0 for a dense model."""
    moe_ffn_size: int = 0
    """Columns of one expert."""
    shared_expert_ffn_size: int = 0
    """Columns of the shared experts together; 0 where there are none."""


@dataclass(frozen=True)
class ParallelDims:
    """How `world` ranks are shared out. All sizes are ranks, `vpp` is model chunks per rank."""

    world: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int

    @classmethod
    def create(cls, config: ParallelConfig, world: int) -> ParallelDims:
        """Check the sizes against the world; raises InputError that shows the arithmetic."""
        dims = cls(
            world=world,
            tp=config.tensor_model_parallel_size,
            pp=config.pipeline_model_parallel_size,
            vpp=config.virtual_pipeline_model_parallel_size or 1,
            cp=config.context_parallel_size,
            ep=config.expert_model_parallel_size,
            etp=config.expert_tensor_parallel_size,
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
        if dims.cp > 1 or dims.etp > 1:
            name = "context_parallel_size" if dims.cp > 1 else "expert_tensor_parallel_size"
            raise InputError(
                f"parallel.{name} = {max(dims.cp, dims.etp)}: not supported yet, only 1; it is "
                "refused because nothing has verified its gradients"
            )
        return dims

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def sequence_parallel(self) -> bool:
        """Megatron's MoE layers refuse tensor parallelism without it."""
        return self.tp > 1

    @property
    def token_multiple(self) -> int:
        """A packed micro-batch is padded to a multiple of this many tokens."""
        return self.tp

    def check_model(self, sizes: ModelSizes) -> None:
        """Raise InputError, with the arithmetic, for every size that the model does not allow."""
        stages = self.pp * self.vpp
        rules = [
            ("attention heads", sizes.num_attention_heads, "tensor", self.tp),
            ("query groups (key/value heads)", sizes.num_query_groups, "tensor", self.tp),
            ("vocabulary entries", sizes.vocab_size, "tensor", self.tp),
            ("dense FFN columns", sizes.dense_ffn_size, "tensor", self.tp),
            ("experts", sizes.num_experts, "expert", self.ep),
            ("layers", sizes.num_layers, "pipeline x virtual", stages),
        ]
        if self.ep > 1 and not sizes.num_experts:
            raise InputError(
                f"parallel.expert_model_parallel_size is {self.ep}, but the model has no experts"
            )
        wrong = [
            f"{count} {what} are not divisible by {size_name} parallel size {size} "
            f"({count} = {count // size} x {size} + {count % size})"
            for what, count, size_name, size in rules
            if count % size
        ]
        if wrong:
            raise InputError("parallel: " + "; ".join(wrong))

    def describe(self) -> str:
        """One line for the plan, e.g. `4 rank(s) = tensor 2 x pipeline 1 x data 2; expert 2`."""
        text = f"{self.world} rank(s) = tensor {self.tp} x pipeline {self.pp} x data {self.dp}"
        if self.vpp > 1:
            text += f", {self.vpp} virtual stages a rank"
        return text + f"; expert {self.ep}" + ("; sequence parallel" if self.tp > 1 else "")
