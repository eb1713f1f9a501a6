"""Read an adapter's matrices for the experts in the form that PEFT writes with transformers 5.

transformers 5 keeps a projection of all experts of a layer as one parameter, and joins the rows of the
gate and up projections in one parameter. PEFT adapts such a parameter as a whole: A is
[experts * r, inputs], one expert after the other, and B is [outputs, r * experts], where the expert's
index varies fastest. If PEFT has trained the parameter, r is the adapter's rank, and the gate and up
projections share one A. If PEFT has read an adapter in which the gate and up projections each have an
A, r is twice the adapter's rank, and an expert's B has the two B matrices as its diagonal blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mrl.config.adapter import PEFT_PREFIX, Adapter, lora_name
from mrl.errors import InputError
from parallel.expected_tensors import rule_shapes
from parallel.hf_config import HfModel
from parallel.lora.peft_config import PeftConfig

Matrix = Literal["A", "B"]


@dataclass(frozen=True)
class FusedExperts:
    """The A and B with which PEFT adapts one parameter that holds a projection of all experts of a
    layer."""

    prefix: str
    """PEFT's name of A and B, without the endings `.lora_A.weight` and `.lora_B.weight`."""
    num_experts: int
    num_parts: int
    """The number of Hugging Face weights of an expert that are joined in the parameter: 2 for gate
    and up projection, otherwise 1."""
    rank: int
    """r: the rank of each expert's part of A and B in the file (see the module docstring)."""

    def name(self, matrix: Matrix) -> str:
        """Return the name that the tensor A or B has in the adapter's file."""
        return f"{self.prefix}.lora_{matrix}.weight"

    def part(self, whole: Tensor, matrix: Matrix, expert: int, number: int, rank: int) -> Tensor:
        """Return the A or B of one Hugging Face weight of an expert, taken out of the fused matrix
        `whole`.

        `number` is the index of the weight among the `num_parts` weights that are joined, and
        `rank` the rank of the adapter. Raises InputError if a row of B also uses the A of the
        expert's other weight.
        """
        if matrix == "A":
            own = whole.unflatten(0, (self.num_experts, self.rank))[expert]
            return own if self.rank == rank else own[number * rank : (number + 1) * rank]
        own = whole.unflatten(1, (self.rank, self.num_experts))[:, :, expert]
        rows = own.chunk(self.num_parts)[number]
        if self.rank == rank:
            return rows.contiguous()
        block = rows[:, number * rank : (number + 1) * rank]
        if rows.count_nonzero() != block.count_nonzero():
            raise InputError(
                f"lora.path: {self.name('B')} mixes gate and up projection of expert {expert} (rank "
                f"{self.rank} for both), expected an A and a B of rank {rank} for each; train it in "
                "PEFT with one rank for all modules, or merge it into the model"
            )
        return block.contiguous()


def find_fused(
    model: HfModel, adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], config: PeftConfig
) -> dict[str, tuple[FusedExperts, Matrix, int, int]]:
    """Find the experts' matrices A and B that a PEFT file holds only as parts of larger, fused
    matrices.

    Return a dict from the name of each matrix to (fused parameter, "A" or "B", index of the expert,
    index of the Hugging Face weight among those that the parameter joins). `shapes` are the shapes
    of the matrices in the file. A parameter whose shapes do not fit is left out. Raises InputError
    for a parameter of another rank or scale than the adapter's.
    """
    found: dict[str, tuple[FusedExperts, Matrix, int, int]] = {}
    for parameter in _parameters(model) if adapter.experts != "none" else ():
        # PEFT wraps the adapter of one parameter of a layer in the other's. Shapes tell them apart.
        for prefix in (parameter.module, f"{parameter.module}.base_layer"):
            fused = _fused(PEFT_PREFIX + prefix, parameter, model.sizes.num_experts, shapes)
            if fused is None:
                continue
            _check_scale(f"{parameter.module}.{parameter.name}", fused, adapter, config)
            for place, weight in enumerate(parameter.weights):
                expert, number = divmod(place, fused.num_parts)
                found[lora_name(weight, "A")] = fused, "A", expert, number
                found[lora_name(weight, "B")] = fused, "B", expert, number
    return found


@dataclass(frozen=True)
class _Parameter:
    """A parameter that holds a projection of all experts of a layer in transformers 5."""

    module: str
    num_parts: int
    inputs: int
    outputs: int
    """The number of rows of one Hugging Face weight in the parameter."""
    weights: list[str]
    """The names of the Hugging Face weights that are joined in the parameter, expert after expert."""

    @property
    def name(self) -> str:
        return "gate_up_proj" if self.num_parts > 1 else "down_proj"


def _parameters(model: HfModel) -> Iterable[_Parameter]:
    found: dict[tuple[int, str], _Parameter] = {}
    if model.architecture.stacked:  # their rows are transposed, and gate and up are in turns
        return ()
    for rule, hf, place, shape in rule_shapes(model):
        if "{expert}" not in rule.megatron:
            continue
        outputs, inputs = shape
        module = f"model.layers.{place['layer']}.mlp.experts"
        new = _Parameter(module, len(rule.hf), inputs, outputs, [])
        found.setdefault((place["layer"], rule.megatron), new).weights.append(hf.format(**place))
    return found.values()


def _fused(
    prefix: str, parameter: _Parameter, num_experts: int, shapes: Mapping[str, tuple[int, ...]]
) -> FusedExperts | None:
    a, b = (shapes.get(f"{prefix}.lora_{matrix}.weight", ()) for matrix in "AB")
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % num_experts:
        return None
    if (a[1], b[0]) != (parameter.inputs, parameter.outputs * parameter.num_parts):
        return None
    return FusedExperts(prefix, num_experts, parameter.num_parts, a[0] // num_experts)


def _check_scale(module: str, fused: FusedExperts, adapter: Adapter, config: PeftConfig) -> None:
    ranks = {adapter.rank, adapter.rank * fused.num_parts}
    rank, scale = config.rank_of(module), config.scale_of(module)
    if fused.rank not in ranks or rank != fused.rank:
        raise InputError(
            f"lora.path: {fused.name('A')} has rank {fused.rank} and adapter_config.json says {rank}, "
            f"expected {' or '.join(map(str, sorted(ranks)))}; train it with one rank for all modules, "
            "or merge it into the model"
        )
    if scale != adapter.scale:
        raise InputError(
            f"lora.path: {module} has the scale {scale:g} (alpha_pattern / rank_pattern), expected "
            f"lora.alpha / lora.rank = {adapter.scale:g} as all others have; multiply its B by the "
            "quotient of the two, or merge it into the model"
        )
